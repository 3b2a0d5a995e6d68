"""Runs one benchmark: `python -m scripts.bench NAME [OPTIONS]`."""

import argparse
import importlib

from scripts.command import run

BENCHMARKS = {
    "balance": "how evenly layouts of a sequence spread attention's work over a ring, counted",
    "context": "how long a context fits which devices, by their compilers: the papers' tables",
    "evaluate": "an environment step by the length of the context: cached, recomputed, rotating",
    "exorl": "relabelling, reading and packing episodes, environments: speeds, ratios",
    "overlap": "whether a ring's messages hide behind its products, on TPUs and GPUs not here",
    "parity": "a step of real episodes around a ring and by bpt: how far gradients are apart",
    "recall": "what is found again of contexts up to 128,000 tokens, around a ring and without",
    "ring": "exact attention against its peers: time, memory, segments, decoding",
    "train": "a whole training step beside its attention and products alone, and its host work",
}


def main() -> None:
    """Hands the options that follow NAME to the module of that name."""
    listing = "\n".join(f"  {name:10} {subject}" for name, subject in BENCHMARKS.items())
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench",
        description=f"benchmarks:\n{listing}",
        epilog="example: python -m scripts.bench ring --tables device memory",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=BENCHMARKS, help="which benchmark")
    parser.add_argument("options", nargs=argparse.REMAINDER, help="see NAME --help")
    arguments = parser.parse_args()
    importlib.import_module(f"scripts.bench.{arguments.name}").main(arguments.options)


if __name__ == "__main__":
    run(main)
