/* Forward and backward passes on one thread: causal attention with ALiBi for short sequences and small heads,
 * relu(x)^2, and a whole narrow block of the paper's decoder.
 *
 * Attention reads qkv as the projection leaves it, [B, T, 3, H, D], and writes [B, T, H, D], as the next projection
 * takes it, so that nothing is copied around the call. All scores of one sequence and head fit into the cache; the
 * backward pass computes them again. Four queries are taken at a time: each key and value that is loaded is used four
 * times.
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

/* Blocks may reach past the last token: there 0, never NaN. */
static inline void transpose(const float *from, long step, long T, long D, float *to) {
    for (long t = 0; t < T; t++)
        for (long d = 0; d < D; d++) to[d * MOST_T + t] = from[t * step + d];
    for (long t = T; t % LANES; t++)
        for (long d = 0; d < D; d++) to[d * MOST_T + t] = 0.0f;
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

/* Scores to weights, in place: exact zeros behind each query, all of which lie in the last block. */
static inline void softmax(long first, long blocks, float p[ROWS][MOST_T]) {
    const ivec place = {0, 1, 2, 3, 4, 5, 6, 7};
    for (int r = 0; r < ROWS; r++) {
        float *last = p[r] + (blocks - 1) * LANES;
        ivec seen = place <= (int32_t)(first + r - (blocks - 1) * LANES);
        store(last, (vec)((seen & (ivec)load(last)) | (~seen & (ivec)((vec){} - 1e30f))));
        vec top = load(p[r]);
        for (long b = 1; b < blocks; b++) top = larger(top, load(p[r] + b * LANES));
        float most = top[0];
        for (int l = 1; l < LANES; l++) most = top[l] > most ? top[l] : most;
        vec sum = {};
        for (long b = 0; b < blocks; b++) {
            vec x = exp_(load(p[r] + b * LANES) - most);
            if (b == blocks - 1) x = (vec)((ivec)x & seen);
            store(p[r] + b * LANES, x);
            sum += x;
        }
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
    Room room;
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
    Room room;
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

/* A block of the paper's decoder, one sequence after another, so that everything but the weights stays in the cache:
 *
 *     middle = x + multiplier * (out(attention(qkv(norm(x)))))
 *     y = middle + multiplier * (down(relu(up(norm(middle)))^2))
 *
 * N width, F = 4 N. T and N are multiples of 8.
 */
#ifdef __AVX512F__
#define WIDE 16
#define TILE 8
#else
#define WIDE 8
#define TILE 4
#endif
typedef float wide __attribute__((vector_size(4 * WIDE), aligned(4)));

/* TILE rows and `VECTORS` vectors of columns of `product`, in registers. */
#define DEFINE_TILE(NAME, VECTOR, SIZE, VECTORS)                                                                       \
    static inline void NAME(const float *a, long down, long right, const float *b, long inner, long columns,           \
                            const float *start, long start_step, float *out) {                                         \
        VECTOR sum[TILE][VECTORS] = {};                                                                                \
        for (int r = 0; start && r < TILE; r++)                                                                        \
            for (int v = 0; v < VECTORS; v++) sum[r][v] = *(const VECTOR *)(start + r * start_step + v * SIZE);        \
        for (long k = 0; k < inner; k++)                                                                               \
            for (int v = 0; v < VECTORS; v++) {                                                                        \
                VECTOR row = *(const VECTOR *)(b + k * columns + v * SIZE);                                            \
                for (int r = 0; r < TILE; r++) sum[r][v] += a[r * down + k * right] * row;                             \
            }                                                                                                          \
        for (int r = 0; r < TILE; r++)                                                                                 \
            for (int v = 0; v < VECTORS; v++) *(VECTOR *)(out + r * columns + v * SIZE) = sum[r][v];                   \
    }
DEFINE_TILE(wide_tile, wide, WIDE, 2)
DEFINE_TILE(narrow_tile, vec, LANES, 1)

/* out[i][j] = start[i][j] + sum_k a[i, k] * b[k][j], where a[i, k] is at a[i * down + k * right]. Rows of `start` lie
 * `start_step` apart (0: the same for all rows); without `start`, sums start at 0.
 */
static inline void product(const float *a, long down, long right, const float *b, long rows, long inner, long columns,
                           const float *start, long start_step, float *out) {
    for (long j = 0; j < columns;) {
        int whole = columns - j >= 2 * WIDE;
        for (long i = 0; i < rows; i += TILE) {
            const float *from = start ? start + i * start_step + j : 0;
            float *to = out + i * columns + j;
            if (whole) wide_tile(a + i * down, down, right, b + j, inner, columns, from, start_step, to);
            else narrow_tile(a + i * down, down, right, b + j, inner, columns, from, start_step, to);
        }
        j += whole ? 2 * WIDE : LANES;
    }
}

/* out = a b */
static inline void times(const float *a, const float *b, long rows, long inner, long columns, float *out) {
    product(a, inner, 1, b, rows, inner, columns, 0, 0, out);
}

/* out += a' b, over rows of tokens */
static inline void add_outer(const float *a, const float *b, long T, long rows, long columns, float *out) {
    product(a, 1, rows, b, rows, T, columns, out, columns, out);
}

/* out = norm(x), with the mean and 1 / the standard deviation of every row in `stats` */
static void norm_forward(const float *x, const float *gain, const float *bias, long T, long N, float eps, float *stats,
                         float *out) {
    for (long t = 0; t < T; t++, x += N, out += N, stats += 2) {
        vec sum = {}, squares = {};
        for (long n = 0; n < N; n += LANES) sum += load(x + n);
        float mean = total(sum) / N;
        for (long n = 0; n < N; n += LANES) squares += (load(x + n) - mean) * (load(x + n) - mean);
        float inverse = 1.0f / __builtin_sqrtf(total(squares) / N + eps);
        for (long n = 0; n < N; n += LANES)
            store(out + n, (load(x + n) - mean) * inverse * load(gain + n) + load(bias + n));
        stats[0] = mean, stats[1] = inverse;
    }
}

/* norm(x) again */
static void norm_again(const float *x, const float *gain, const float *bias, const float *stats, long T, long N,
                       float *out) {
    for (long t = 0; t < T; t++, x += N, out += N, stats += 2)
        for (long n = 0; n < N; n += LANES)
            store(out + n, (load(x + n) - stats[0]) * stats[1] * load(gain + n) + load(bias + n));
}

/* dx += the gradient through norm(x), and the gradients of its gain and bias */
static void norm_backward(const float *x, const float *gain, const float *stats, const float *grad, long T, long N,
                          float *dgain, float *dbias, float *dx) {
    for (long t = 0; t < T; t++, x += N, grad += N, dx += N, stats += 2) {
        vec sum = {}, along = {};
        for (long n = 0; n < N; n += LANES) {
            vec g = load(grad + n), unit = (load(x + n) - stats[0]) * stats[1];
            store(dgain + n, load(dgain + n) + g * unit);
            store(dbias + n, load(dbias + n) + g);
            g *= load(gain + n);
            sum += g, along += g * unit;
        }
        float mean = total(sum) / N, slope = total(along) / N;
        for (long n = 0; n < N; n += LANES) {
            vec unit = (load(x + n) - stats[0]) * stats[1];
            store(dx + n, load(dx + n) + stats[1] * (load(grad + n) * load(gain + n) - mean - slope * unit));
        }
    }
}

static void add_rows(const float *x, long T, long n, float *out) {
    for (long t = 0; t < T; t++, x += n)
        for (long i = 0; i < n; i += LANES) store(out + i, load(out + i) + load(x + i));
}

static void turn(const float *from, long rows, long columns, float *to) {
    for (long i = 0; i < rows; i++)
        for (long j = 0; j < columns; j++) to[j * rows + i] = from[i * columns + j];
}

enum { NORM1, BIAS1, QKV, QKV_BIAS, OUT, OUT_BIAS, NORM2, BIAS2, UP, UP_BIAS, DOWN, DOWN_BIAS };

/* `kept` has 9 N + 4 floats for every token: qkv, attention, middle, up, and the statistics of both norms. `scratch`
 * has 12 N N + 6 T N floats.
 */
void block_forward(const float *x, const float *const *w, const float *slopes, float *kept, float *scratch, float *y,
                   long B, long T, long H, long D, float scale, float multiplier, float eps) {
    long N = H * D, F = 4 * N, S = B * T;
    float *qkv = kept, *attention = qkv + 3 * S * N, *middle = attention + S * N, *up = middle + S * N;
    float *stats1 = up + S * F, *stats2 = stats1 + 2 * S;
    float *to_qkv = scratch, *to_out = to_qkv + 3 * N * N, *to_up = to_out + N * N, *to_down = to_up + F * N;
    float *h = to_down + F * N, *active = h + T * N, *branch = active + T * F;
    turn(w[QKV], 3 * N, N, to_qkv);
    turn(w[OUT], N, N, to_out);
    turn(w[UP], F, N, to_up);
    turn(w[DOWN], N, F, to_down);
    for (long b = 0; b < B; b++) {
        norm_forward(x, w[NORM1], w[BIAS1], T, N, eps, stats1, h);
        product(h, N, 1, to_qkv, T, N, 3 * N, w[QKV_BIAS], 0, qkv);
        attention_forward(qkv, slopes, attention, 1, T, H, D, scale);
        product(attention, N, 1, to_out, T, N, N, w[OUT_BIAS], 0, branch);
        for (long i = 0; i < T * N; i += LANES) store(middle + i, load(x + i) + multiplier * load(branch + i));
        norm_forward(middle, w[NORM2], w[BIAS2], T, N, eps, stats2, h);
        product(h, N, 1, to_up, T, N, F, w[UP_BIAS], 0, up);
        relu2_forward(up, active, T * F);
        product(active, F, 1, to_down, T, F, N, w[DOWN_BIAS], 0, branch);
        for (long i = 0; i < T * N; i += LANES) store(y + i, load(middle + i) + multiplier * load(branch + i));
        x += T * N, y += T * N, qkv += 3 * T * N, attention += T * N, middle += T * N, up += T * F;
        stats1 += 2 * T, stats2 += 2 * T;
    }
}

/* `dw` starts at zero. `scratch` has 11 T N floats. */
void block_backward(const float *x, const float *const *w, const float *slopes, const float *kept, const float *grad,
                    float *scratch, float *dx, float *const *dw, long B, long T, long H, long D, float scale,
                    float multiplier) {
    long N = H * D, F = 4 * N, S = B * T;
    const float *qkv = kept, *attention = qkv + 3 * S * N, *middle = attention + S * N, *up = middle + S * N;
    const float *stats1 = up + S * F, *stats2 = stats1 + 2 * S;
    float *h = scratch, *branch = h + T * N, *dh = branch + T * N, *active = dh + T * N, *dactive = active + T * F;
    float *dup = active, *dattention = active, *dqkv = dactive; /* each when the other is no longer needed */
    for (long b = 0; b < B; b++) {
        for (long i = 0; i < T * N; i += LANES) store(branch + i, multiplier * load(grad + i));
        relu2_forward(up, active, T * F);
        add_outer(branch, active, T, N, F, dw[DOWN]);
        add_rows(branch, T, N, dw[DOWN_BIAS]);
        times(branch, w[DOWN], T, N, F, dactive);
        relu2_backward(up, dactive, dup, T * F);
        norm_again(middle, w[NORM2], w[BIAS2], stats2, T, N, h);
        add_outer(dup, h, T, F, N, dw[UP]);
        add_rows(dup, T, F, dw[UP_BIAS]);
        times(dup, w[UP], T, F, N, dh);
        memcpy(dx, grad, sizeof(float) * T * N);
        norm_backward(middle, w[NORM2], stats2, dh, T, N, dw[NORM2], dw[BIAS2], dx);
        for (long i = 0; i < T * N; i += LANES) store(branch + i, multiplier * load(dx + i));
        add_outer(branch, attention, T, N, N, dw[OUT]);
        add_rows(branch, T, N, dw[OUT_BIAS]);
        times(branch, w[OUT], T, N, N, dattention);
        attention_backward(qkv, slopes, dattention, dqkv, 1, T, H, D, scale);
        norm_again(x, w[NORM1], w[BIAS1], stats1, T, N, h);
        add_outer(dqkv, h, T, 3 * N, N, dw[QKV]);
        add_rows(dqkv, T, 3 * N, dw[QKV_BIAS]);
        times(dqkv, w[QKV], T, 3 * N, N, dh);
        norm_backward(x, w[NORM1], stats1, dh, T, N, dw[NORM1], dw[BIAS1], dx);
        x += T * N, grad += T * N, dx += T * N, qkv += 3 * T * N, attention += T * N, middle += T * N, up += T * F;
        stats1 += 2 * T, stats2 += 2 * T;
    }
}
