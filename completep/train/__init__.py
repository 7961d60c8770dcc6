"""Training the reference decoder: a Run in, a folder out with metrics, checkpoints, plain weights and a result.

`train` in loop.py is the entry point. It reads batches from completep.data, builds the model under completep.rules,
and uses the other files here. The same call resumes an interrupted run, bit for bit.

In reading order:

    settings.py      which run is trained, how it is executed; its corpus
    folder.py        a run's folder: which run it is, its lock, its hashes
    loop.py          train(run, folder): the linear training loop
    schedule.py      step → learning-rate factor
    records.py       metrics.jsonl and the result, as typed records
    checked.py       what a result.json may hold
    checkpoint.py    checkpoints: written completely or not at all, verified before use, without pickles
    distributed.py   ranks, DDP and FSDP2
    speed.py         allocator settings, compilation, peak FLOP/s
    fused.py         attention and relu² on a CPU, compiled from kernels.c
    export.py        trained weights, folded into one safetensors file
"""
