"""Activation checkpointing as a policy: what backward recomputes, keeps, or fetches from the host.

A tower is a row of blocks; each policy changes how a block's forward keeps what its backward needs. The wrapping is
done on the instance's ``forward``, inside ``__call__``: DeepSpeed's ZeRO-3 hooks stay around it, and no parameter is
renamed.

| policy    | a block keeps                                             | backward recomputes                     |
|-----------|-----------------------------------------------------------|-----------------------------------------|
| none      | everything                                                | nothing                                 |
| full      | its input                                                 | the block                               |
| every:K   | its input in every K-th block, everything in the others   | every K-th block                        |
| ops       | its input, outputs of matrix products and attention       | the rest: norms, activations, softmax   |
| offload   | everything, in host memory                                | nothing, but copies it there and back   |
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from disco_ds.errors import ConfigError

_BLOCK = re.compile(r"(Block|Bottleneck|Layer)$")


def find_blocks(tower: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a tower in the order of the module tree, outermost only.

    A block is an entry of a ModuleList or Sequential whose class is called …Block, …Bottleneck or …Layer: that is what
    open_clip's and timm's vision transformers, ResNets and ConvNets and Hugging Face's text encoders call theirs.
    """
    row = isinstance(tower, (nn.ModuleList, nn.Sequential))
    found = []
    for child in tower.children():
        block = row and _BLOCK.search(type(child).__name__) and any(True for _ in child.parameters())
        found += [child] if block else find_blocks(child)
    return found


def apply_policy(towers: dict[str, list[nn.Module]], policy: str, *, by_deepspeed: bool = False) -> None:
    """Make the blocks of each tower follow a policy.

    Args:
        towers: the modules of each tower that is trained, by the tower's name. A locked tower keeps no activations.
        policy: none, full, every:K, ops or offload, as in ``ModelConfig.checkpointing``.
        by_deepspeed: full and every:K through ``deepspeed.checkpointing``, which the ds_config's section configures.

    Raises:
        ConfigError: a tower has no blocks that could be recognised.
    """
    if policy == "none":
        return
    for tower, modules in towers.items():
        blocks = [block for module in modules for block in find_blocks(module)]
        if not blocks:
            raise ConfigError(f"model.checkpointing {policy}: no blocks were recognised in the {tower} tower")
        stride = int(policy.partition(":")[2] or 1)
        for block in blocks[::stride]:
            how = "deepspeed" if by_deepspeed else policy
            wrapped = functools.partial(_forward, block, block.forward, how)
            block.forward = functools.update_wrapper(wrapped, block.forward)  # type: ignore[method-assign]


def _forward(block: nn.Module, forward: Callable[..., Any], how: str, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """A block's forward under a policy; "deepspeed" is DeepSpeed's own recomputation."""
    if not torch.is_grad_enabled():
        return forward(x, *args, **kwargs)
    if how == "offload":
        return _offloaded(block, forward, x, *args, **kwargs)
    if how == "deepspeed":
        import deepspeed

        # x alone goes through: DeepSpeed's version takes no None and no keywords apart
        return deepspeed.checkpointing.checkpoint(lambda y: forward(y, *args, **kwargs), x)
    contexts = functools.partial(_contexts, block, how == "ops")
    return checkpoint(forward, x, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def _contexts(block: nn.Module, keep_products: bool) -> tuple[AbstractContextManager, AbstractContextManager]:
    """The contexts of a block's first forward and of its second one."""
    if not keep_products:
        return nullcontext(), frozen_statistics(block)
    kept: list[_Kept] = []
    return _KeepProducts(kept), _second_forward(block, kept)


@contextmanager
def _second_forward(block: nn.Module, kept: list[_Kept]) -> Iterator[None]:
    with frozen_statistics(block), _ReuseProducts(kept):
        yield


_PRODUCTS = {
    op.default
    for name in (
        "mm", "addmm", "bmm", "baddbmm", "convolution",
        "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
    )
    if (op := getattr(torch.ops.aten, name, None)) is not None
}  # fmt: skip


@dataclass
class _Kept:
    op: Any
    output: Any
    versions: list[int]


class _KeepProducts(TorchDispatchMode):
    """Keeps the outputs of matrix products and attention.

    torch's own selective checkpointing does the same, but insists on the very same sequence of all other operations in
    both forwards, and ZeRO-3 gathers weights in between, in the second forward other ones than in the first. It also
    misses that ZeRO-3's linear layers add their bias in place through a view that shares no version counter with the
    product; here a product is copied before anything writes to its storage.
    """

    def __init__(self, kept: list[_Kept]) -> None:
        super().__init__()
        self.kept = kept
        self.by_storage: dict[int, _Kept] = {}

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if op._schema.is_mutable:
            self._copy_written(op, args, kwargs)
        output = op(*args, **kwargs)
        if op in _PRODUCTS:
            kept = _Kept(op, output, _versions(output))
            self.kept.append(kept)
            if isinstance(output, Tensor):
                self.by_storage[output.untyped_storage()._cdata] = kept
        return output

    def _copy_written(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments = enumerate(op._schema.arguments)
        written = [each for each in arguments if each[1].alias_info is not None and each[1].alias_info.is_write]
        values = [args[position] if position < len(args) else kwargs.get(each.name) for position, each in written]
        for tensor in _tensors(values):
            kept = self.by_storage.pop(tensor.untyped_storage()._cdata, None)
            if kept is not None:
                kept.output = kept.output.clone()
                kept.versions = _versions(kept.output)


class _ReuseProducts(TorchDispatchMode):
    """Gives the kept outputs back in order; one that was overwritten in the meantime is computed again."""

    def __init__(self, kept: list[_Kept]) -> None:
        super().__init__()
        self.kept = iter(kept)

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op in _PRODUCTS:
            kept = next(self.kept, None)
            if kept is None or kept.op is not op:
                raise RuntimeError(f"model.checkpointing ops: the second forward runs {op} where the first did not")
            if _versions(kept.output) == kept.versions:
                return kept.output
        return op(*args, **(kwargs or {}))


def _tensors(nested: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(nested) if isinstance(leaf, Tensor)]


def _versions(output: Any) -> list[int]:
    return [tensor._version for tensor in _tensors(output)]


def _offloaded(block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Forward with what autograd saves copied to the host; weights stay where they are."""

    def is_weight(tensor: Tensor) -> bool:  # looked up each time: ZeRO-3 gives a parameter another storage at each use
        storage = tensor.untyped_storage()._cdata
        return any(parameter.untyped_storage()._cdata == storage for parameter in block.parameters())

    def pack(tensor: Tensor) -> tuple[torch.device | None, Tensor]:
        if tensor.device.type == "cpu" or is_weight(tensor):
            return None, tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        return tensor.device, host

    def unpack(packed: tuple[torch.device | None, Tensor]) -> Tensor:
        device, tensor = packed
        return tensor if device is None else tensor.to(device, non_blocking=True)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return forward(*args, **kwargs)


def batch_norms(module: nn.Module) -> list[nn.modules.batchnorm._BatchNorm]:
    """The layers of a model that keep running statistics."""
    norms = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    return [norm for norm in norms if norm.track_running_stats]


@contextmanager
def frozen_statistics(module: nn.Module) -> Iterator[None]:
    """Second forwards of the same samples leave the running statistics of batch norms alone.

    The batch is still normalised by its own statistics, as in the first forward; only the running averages, which
    evaluation uses, would otherwise count each sample twice.
    """
    norms = batch_norms(module)
    before = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum, norm.num_batches_tracked = 0.0, None  # not counted
    try:
        yield
    finally:
        for norm, state in zip(norms, before, strict=True):
            norm.momentum, norm.num_batches_tracked = state
