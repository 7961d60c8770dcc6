"""Runs done exactly once, on this machine or on a cluster, through crashes and kills. It knows tasks, not studies.

In: trials, each a point on some axes with its `Task`. Out: a store with one folder per task, and which tasks failed.

    task.py      what the machinery must know of a task: a protocol that any kind of run can have
    claims.py    who works on a task: kernel locks, or heartbeats on a network file system
    store.py     folders named by content; claims; what is done
    queue.py     tasks as files, for workers on other machines
    progress.py  how far a sweep is, and how long the rest will take
    child.py     a child process of a task, which is stopped and ends with it
    devices.py   this machine's GPUs and memory; a run over several processes (torchrun)
    engine.py    the one loop that starts tasks, judges how they ended and retries
    local.py     backend: a process per task on this machine
    on_ray.py    backend: a Ray cluster
    worker.py    takes tasks from a queue: `completep worker`
    slurm.py     backend: an array job of workers on a SLURM cluster
    backends.py  a backend by its name
    training.py  a training run of the decoder as a task
    packing.py   a store's results as one small file, without weights
    search.py    which trials to run: the whole grid, or a walk to each curve's minimum
    conduct.py   trials × search × engine, with progress reports
"""
