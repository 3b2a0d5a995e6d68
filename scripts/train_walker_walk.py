"""Train on walker_walk: any preset of scripts.train with this task's data and folders.

Example:
    python -m scripts.train_walker_walk at_step --require gpu
    python -m scripts.train_walker_walk at_ring_128 --require gpu

Data, from the datasets that scripts.download brings (packing names those that are missing):
    python -m scripts.pack --domain walker --mix exorl8 \
        --out ~/.cache/exoring/stores/walker-exorl8

With another store: --data.store FOLDER. Runs lie in runs/walker_walk/<preset>.

Hardware: at_step one GPU; at_ring_128 (128 trajectories of 1,000 steps: 512,000 tokens) eight GPUs
or TPU chips; tiny, with a small store, a laptop.

Time and score: not measured on ExoRL's own data yet; docs/training.md says what was.
"""

from scripts.train import train_task

TASK = "walker_walk"

if __name__ == "__main__":
    train_task(TASK, __doc__)
