"""The paper's results, one file per study: its axes at each scale, its run, its finding, its figure.

In: a name, a scale, other values on some axes. Out: a `StudyResult`: agreement with the paper, numbers, figures.

    scale.py     what all studies of one size share, and the two recipes for a run
    design.py    what a study is: `Sweep` (training runs) or `Measurement`; `listed` makes it known
    judging.py   what several studies judge alike
    lr_transfer.py, init_transfer.py, lr_transfer_compute_optimal.py, eps_transfer.py   transfer over depth
    expert_transfer.py                                                                  of a mixture of experts
    qk_norm.py, embedding_lr.py                                                         objections, put to the test
    dynamics.py, coordinates.py, laziness.py                                            what happens during training
    shape.py, tau.py, lr_wd_grid.py, horizon.py, downstream.py                          compute-optimal training
    result.py    what a study, its plan and its status say
    run.py       `study`, its plan, status and report: from a name to a result
    demo.py      one seed of lr-transfer
"""
