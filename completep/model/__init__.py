"""The reference decoder: a GPTConfig in, an ordinary nn.Module out that turns token ids into logits or a loss.

gpt.py   the paper's decoder with its options; it applies two multipliers and knows no scaling rules
"""
