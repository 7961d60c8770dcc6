"""Costs and plans: a model shape or a budget in, FLOPs, bytes and a complete run out. Nothing here needs torch.

In reading order:

    flops.py    parameters and training FLOPs of the reference decoder, per component
    memory.py   bytes per rank: weights, gradients, optimizer state, activations
    shapes.py   a size or a budget → the shape with the best ratio of width to depth
    planned.py  a plan: a run, the law behind each setting, and how both are shown
    plan.py     a size or a budget, or a tuned run → a plan
    laws.py     losses and FLOPs of runs → scaling laws and FLOP savings
"""
