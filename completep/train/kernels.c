/* Causal attention with ALiBi for short sequences and small heads, and relu(x)^2: forward and backward, on one thread.
 *
 * Attention reads qkv as the projection leaves it, [B, T, 3, H, D], and writes [B, T, H, D], as the next projection
 * takes it, so that nothing is copied around the call. All scores of one sequence and head fit into the cache; the backward
 * pass computes them again. Four queries are taken at a time: each key and value that is loaded is used four times.
 */
#include <stdint.h>
#include <string.h>

#define LANES 8
#define ROWS 4
#define MOST_T 128
#define MOST_D 32
typedef float vec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), aligned(4)));

static inline vec load(const float *p) { return *(const vec *)p; }
static inline void store(float *p, vec x) { *(vec *)p = x; }

/* The larger of the two; x where either is not a number, so that no NaN of x is lost. */
static inline vec larger(vec x, vec y) {
    ivec second = y > x;
    return (vec)((second & (ivec)y) | (~second & (ivec)x));
}

/* exp(x) for x <= 0, to one part in 10^7 (Cephes' polynomial). */
static inline vec exp_(vec x) {
    x = larger(x, (vec){} - 87.0f);
    ivec n = __builtin_convertvector(x * 1.44269504f - 0.5f, ivec); /* rounds towards zero, and x <= 0 */
    vec f = __builtin_convertvector(n, vec);
    vec r = (x - f * 0.693359375f) + f * 2.12194440e-4f;
    vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    ivec power = (n + 127) << 23;
    return p * (vec)power;
}

static inline float total(vec x) {
    float sum = 0.0f;
    for (int l = 0; l < LANES; l++) sum += x[l];
    return sum;
}

typedef struct {
    float keys[MOST_D * MOST_T], values[MOST_D * MOST_T]; /* transposed: [D][T] */
    float p[ROWS][MOST_T], dp[ROWS][MOST_T];
    float dk[MOST_T * MOST_D], dv[MOST_T * MOST_D]; /* [T][D] */
} Room;

static inline void transpose(const float *from, long step, long T, long D, float *to) {
    for (long t = 0; t < T; t++)
        for (long d = 0; d < D; d++) to[d * MOST_T + t] = from[t * step + d];
}

/* out[r][j] = slope * (j - r - first) + scale * sum_d x[r][d] * y[d][j], for the first `blocks` blocks of j. */
static inline void products(const float *x, long step, const float *y, long D, long blocks, float scale, float slope,
                            long first, float out[ROWS][MOST_T]) {
    const vec place = {0, 1, 2, 3, 4, 5, 6, 7};
    for (long b = 0; b < blocks; b++) {
        vec sum[ROWS] = {};
        for (long d = 0; d < D; d++) {
            vec row = load(y + d * MOST_T + b * LANES);
            for (int r = 0; r < ROWS; r++) sum[r] += x[r * step + d] * row;
        }
        vec here = place + (float)(b * LANES - first);
        for (int r = 0; r < ROWS; r++) store(out[r] + b * LANES, sum[r] * scale + slope * (here - (float)r));
    }
}

/* Scores to weights, in place: exact zeros behind each query. */
static inline void softmax(long first, long blocks, float p[ROWS][MOST_T]) {
    for (int r = 0; r < ROWS; r++) {
        for (long j = first + r + 1; j < blocks * LANES; j++) p[r][j] = -1e30f;
        vec top = load(p[r]);
        for (long b = 1; b < blocks; b++) top = larger(top, load(p[r] + b * LANES));
        float most = top[0];
        for (int l = 1; l < LANES; l++) most = top[l] > most ? top[l] : most;
        vec sum = {};
        for (long b = 0; b < blocks; b++) {
            vec x = exp_(load(p[r] + b * LANES) - most);
            store(p[r] + b * LANES, x);
            sum += x;
        }
        for (long j = first + r + 1; j < blocks * LANES; j++) { sum[j % LANES] -= p[r][j]; p[r][j] = 0.0f; }
        float inverse = 1.0f / total(sum);
        for (long b = 0; b < blocks; b++) store(p[r] + b * LANES, load(p[r] + b * LANES) * inverse);
    }
}

/* out[r][d] = sum_j p[r][j] * y[j][d] */
static inline void weighted(float p[ROWS][MOST_T], const float *y, long step, long T, long D, float *out,
                            long out_step) {
    for (long d = 0; d < D; d += LANES) {
        vec sum[ROWS] = {};
        for (long j = 0; j < T; j++) {
            vec row = load(y + j * step + d);
            for (int r = 0; r < ROWS; r++) sum[r] += p[r][j] * row;
        }
        for (int r = 0; r < ROWS; r++) store(out + r * out_step + d, sum[r]);
    }
}

/* out[j][d] += sum_r p[r][j] * x[r][d] */
static inline void spread(float p[ROWS][MOST_T], const float *x, long step, long T, long D, float *out) {
    for (long d = 0; d < D; d += LANES) {
        vec row[ROWS];
        for (int r = 0; r < ROWS; r++) row[r] = load(x + r * step + d);
        for (long j = 0; j < T; j++) {
            vec sum = load(out + j * D + d);
            for (int r = 0; r < ROWS; r++) sum += p[r][j] * row[r];
            store(out + j * D + d, sum);
        }
    }
}

static inline void head_forward(Room *room, const float *q, const float *k, const float *v, float slope, float *out,
                                long step, long out_step, long T, long D, float scale) {
    transpose(k, step, T, D, room->keys);
    for (long i = 0; i < T; i += ROWS) {
        long blocks = (i + ROWS + LANES - 1) / LANES;
        products(q + i * step, step, room->keys, D, blocks, scale, slope, i, room->p);
        softmax(i, blocks, room->p);
        weighted(room->p, v, step, i + ROWS, D, out + i * out_step, out_step);
    }
}

static inline void head_backward(Room *room, const float *q, const float *k, const float *v, float slope,
                                 const float *grad, float *dq, float *dk, float *dv, long step, long out_step, long T,
                                 long D, float scale) {
    transpose(k, step, T, D, room->keys);
    transpose(v, step, T, D, room->values);
    memset(room->dk, 0, sizeof(float) * T * D);
    memset(room->dv, 0, sizeof(float) * T * D);
    for (long i = 0; i < T; i += ROWS) {
        long blocks = (i + ROWS + LANES - 1) / LANES, reach = i + ROWS;
        const float *g = grad + i * out_step;
        products(q + i * step, step, room->keys, D, blocks, scale, slope, i, room->p);
        softmax(i, blocks, room->p);
        products(g, out_step, room->values, D, blocks, 1.0f, 0.0f, i, room->dp);
        spread(room->p, g, out_step, reach, D, room->dv);
        for (int r = 0; r < ROWS; r++) {
            vec sum = {};
            for (long b = 0; b < blocks; b++) sum += load(room->p[r] + b * LANES) * load(room->dp[r] + b * LANES);
            float mean = total(sum);
            for (long b = 0; b < blocks; b++) {
                vec p = load(room->p[r] + b * LANES), dp = load(room->dp[r] + b * LANES);
                store(room->p[r] + b * LANES, scale * p * (dp - mean));
            }
        }
        weighted(room->p, k, step, reach, D, dq + i * step, step);
        spread(room->p, q + i * step, step, reach, D, room->dk);
    }
    for (long t = 0; t < T; t++) {
        memcpy(dk + t * step, room->dk + t * D, sizeof(float) * D);
        memcpy(dv + t * step, room->dv + t * D, sizeof(float) * D);
    }
}

#define FORWARD(D) head_forward(&room, q, q + n, q + 2 * n, slopes[h], o, 3 * n, n, T, D, scale)
#define BACKWARD(D) head_backward(&room, q, q + n, q + 2 * n, slopes[h], g, d, d + n, d + 2 * n, 3 * n, n, T, D, scale)

void attention_forward(const float *qkv, const float *slopes, float *out, long B, long T, long H, long D,
                       float scale) {
    Room room = {0}; /* blocks may reach past the last token: there 0, never NaN */
    long n = H * D;
    for (long b = 0; b < B; b++)
        for (long h = 0; h < H; h++) {
            const float *q = qkv + b * T * 3 * n + h * D;
            float *o = out + b * T * n + h * D;
            if (D == 8) FORWARD(8); else if (D == 16) FORWARD(16); else FORWARD(D);
        }
}

void attention_backward(const float *qkv, const float *slopes, const float *grad, float *dqkv, long B, long T, long H,
                        long D, float scale) {
    Room room = {0}; /* blocks may reach past the last token: there 0, never NaN */
    long n = H * D;
    for (long b = 0; b < B; b++)
        for (long h = 0; h < H; h++) {
            const float *q = qkv + b * T * 3 * n + h * D, *g = grad + b * T * n + h * D;
            float *d = dqkv + b * T * 3 * n + h * D;
            if (D == 8) BACKWARD(8); else if (D == 16) BACKWARD(16); else BACKWARD(D);
        }
}

/* y = relu(x)^2, which is 0 for a negative x and NaN for NaN */
void relu2_forward(const float *x, float *y, long n) {
    for (long i = 0; i < n; i++) y[i] = x[i] < 0.0f ? 0.0f : x[i] * x[i];
}

void relu2_backward(const float *x, const float *grad, float *dx, long n) {
    for (long i = 0; i < n; i++) dx[i] = x[i] < 0.0f ? 0.0f : 2.0f * x[i] * grad[i];
}
