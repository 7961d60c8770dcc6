"""A vision transformer. The rules do not depend on the kind of data.

python -m examples.vit
"""

import torch
import torch.nn.functional as F
from transformers import ViTConfig, ViTForImageClassification

import completep as cp
from completep.measure.linearization import images

STEPS, BATCH = 60, 64


def vit(width: int, depth: int) -> torch.nn.Module:
    sizes = {
        "hidden_size": width,
        "num_hidden_layers": depth,
        "intermediate_size": 4 * width,
        "num_attention_heads": width // 16,
    }
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return ViTForImageClassification(
        ViTConfig(image_size=SIDE, patch_size=SIDE // 4, num_channels=1, num_labels=10, **sizes, **off)
    )


PIXELS, LABELS = images()
SIDE = int(PIXELS.shape[1] ** 0.5)


def main() -> tuple[list[float], float]:
    pictures = PIXELS.float().view(-1, 1, SIDE, SIDE)
    model = vit(width=64, depth=4)
    scaling = cp.parametrize(model, base=lambda: vit(width=32, depth=2), example={"pixel_values": pictures[:2]})
    scaling.init_(std=0.1, seed=0)
    optimizer = torch.optim.AdamW(scaling.param_groups(lr=2**-7, eps=1e-12), betas=(0.9, 0.95))
    order = torch.randperm(len(pictures), generator=torch.Generator().manual_seed(0))
    train, test = order[:-200], order[-200:]
    losses = []
    for step in range(STEPS):
        some = train[torch.arange(step * BATCH, (step + 1) * BATCH) % len(train)]
        loss = F.cross_entropy(model(pixel_values=pictures[some]).logits, LABELS[some].long())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        right = (model(pixel_values=pictures[test]).logits.argmax(-1) == LABELS[test]).float().mean().item()
    return losses, right


if __name__ == "__main__":
    losses, right = main()
    print(f"loss {losses[0]:.3f} → {losses[-1]:.3f}, accuracy on unseen digits {right:.0%}")
