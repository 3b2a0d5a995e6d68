"""Train on cartpole_swingup: any preset of scripts.train with this task's data and folders.

Example:
    python -m scripts.train_cartpole_swingup at_step --require gpu
    python -m scripts.train_cartpole_swingup at_ring_128 --require gpu

Data, from the datasets that scripts.download brings (packing names those that are missing):
    python -m scripts.pack --domain cartpole --mix exorl8 \
        --out ~/.cache/exoring/stores/cartpole-exorl8

With another store: --data.store FOLDER. Runs lie in runs/cartpole_swingup/<preset>.

Hardware: at_step one GPU; at_ring_128 (128 trajectories of 1,000 steps: 512,000 tokens) eight GPUs
or TPU chips; tiny, with a small store, a laptop.

Time and score: not measured on ExoRL's own data yet; docs/training.md says what was.
"""

from scripts.train import train_task

TASK = "cartpole_swingup"

if __name__ == "__main__":
    train_task(TASK, __doc__)
