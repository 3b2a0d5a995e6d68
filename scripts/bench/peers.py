"""Other people's attention, in the form of ours: q, k, v [B, T, H, D] to the output, causal."""

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.extend.backend
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

Attend = Callable[[Array, Array, Array], Array]

# What `make bench` installs beside the environment; never a dependency.
RINGATTENTION = ("ringattention==0.1.2", "einops==0.8.1")


def ringattention(folder: Path, mesh: Mesh, chunk: int) -> Attend:
    """The Ring Attention authors' own package, around the mesh axis `ring`.

    Raises:
        FileNotFoundError: It is not in the folder; the message says how to get it there.
    """
    if not (folder / "ringattention").is_dir():
        raise FileNotFoundError(
            f"{folder}: no ringattention in it; run `make bench`, or "
            f"pip install --no-deps --target {folder} {' '.join(RINGATTENTION)}"
        )
    # It imports a module that JAX has moved since.
    jax.lib.xla_bridge = jax.extend.backend  # pyright: ignore[reportAttributeAccessIssue]
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    module: Any = __import__("ringattention")
    settings = {
        "causal_block_size": 1,
        "deterministic": True,
        "dropout_rng": None,
        "attn_pdrop": 0.0,
        "query_chunk_size": chunk,
        "key_chunk_size": chunk,
        "dtype": jnp.float32,
        "policy": jax.checkpoint_policies.nothing_saveable,
        "precision": None,
        "prevent_cse": False,
    }
    local = functools.partial(
        module.ring_attention,
        axis_name="ring",
        float32_logits=True,
        cache_idx=None,
        blockwise_kwargs=settings,
    )
    spec = P(None, "ring")
    return jax.shard_map(
        lambda q, k, v: local(q, k, v, None, None),
        mesh=mesh,
        in_specs=(spec, spec, spec),
        out_specs=spec,
        check_vma=False,
    )


def dot_product_attention(q: Array, k: Array, v: Array) -> Array:
    """JAX's own, which holds all scores at once."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")


def torch_sdpa(arrays: list[Array], backward: bool) -> Callable[[], object] | None:
    """PyTorch's on the same numbers [B, T, H, D], causal; None if PyTorch is not installed."""
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    import numpy as np

    q, k, v, dout = (torch.tensor(np.asarray(x).swapaxes(1, 2)) for x in arrays)
    attend = torch.nn.functional.scaled_dot_product_attention
    if not backward:
        return lambda: attend(q, k, v, is_causal=True)
    operands = [x.requires_grad_() for x in (q, k, v)]

    def both() -> object:
        return torch.autograd.grad(attend(*operands, is_causal=True), operands, dout)

    return both
