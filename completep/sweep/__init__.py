"""Runs done exactly once, on this machine or on a cluster, even after crashes. Nothing here knows of studies.

In: trials, each a `Task` with its point on some axes. Out: a store with one folder per task, and the tasks that failed.

    task.py      the protocol of a task: any kind of run can implement it
    claims.py    who works on a task: kernel locks, or heartbeats on a network file system
    store.py     one folder per task, named by a hash; claims and results
    queue.py     tasks as files, for workers on other machines
    progress.py  the progress of a sweep, and an estimate of the time left
    child.py     a child process of a task, which ends when the task ends
    devices.py   this machine's GPUs and memory; a run over several processes (torchrun)
    engine.py    the one loop that starts tasks, judges how they ended and retries
    local.py     backend: a process per task on this machine
    on_ray.py    backend: a Ray cluster
    worker.py    takes tasks from a queue: `completep worker`
    slurm.py     backend: an array job of workers on a SLURM cluster
    backends.py  a backend by its name
    training.py  a training run of the reference decoder as a task
    packing.py   a store's results as one small file, without weights
    search.py    which trials to run: the whole grid, or a walk to each curve's minimum
    conduct.py   runs trials with a search and an engine, and reports progress
"""
