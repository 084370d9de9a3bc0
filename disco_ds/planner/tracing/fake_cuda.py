"""What a training step on a GPU needs and fake CUDA tensors do not have, on a machine without a GPU.

Three things differ from a real device: the C++ autograd engine refuses fake CUDA tensors (pytorch#92627), autocast
switches itself off, and attention falls back to its mathematical form, which keeps more. Each has its stand-in here.
All of it reaches into torch's internals; :mod:`~disco_ds.planner.tracing.selfcheck` says when a torch release
moved them.
"""

from __future__ import annotations

import heapq
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@contextmanager
def autocast_possible() -> Iterator[None]:
    """Let ``torch.autocast("cuda")`` believe in a GPU: checkpointing enters it again for its second forwards."""
    from torch.cuda.amp import common

    probes = (common.amp_definitely_not_available, torch.cuda.is_bf16_supported)
    common.amp_definitely_not_available = lambda: False
    torch.cuda.is_bf16_supported = lambda *_, **__: True
    try:
        yield
    finally:
        common.amp_definitely_not_available, torch.cuda.is_bf16_supported = probes


@contextmanager
def cuda_attention(kind: str) -> Iterator[None]:
    """Attention as a GPU computes it: "flash" (memory-efficient where there is a mask or fp32), or "math"."""
    original = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = _math_attention if kind == "math" else _fused_attention  # type: ignore[assignment]
    try:
        yield
    finally:
        F.scaled_dot_product_attention = original


def _autocast(*tensors: Tensor | None) -> list[Any]:
    if not torch.is_autocast_enabled("cuda"):
        return list(tensors)
    dtype = torch.get_autocast_dtype("cuda")
    return [t.to(dtype) if t is not None and t.is_floating_point() else t for t in tensors]


def _fused_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """The choice of torch's sdp_utils on sm80 and later: flash without a mask, else memory-efficient."""
    query, key, value, attn_mask = _autocast(query, key, value, attn_mask)
    if attn_mask is None and query.dtype != torch.float32:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout_p, is_causal, scale=scale)[0]
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, float("-inf"))
        length = key.shape[-2]
        if attn_mask.shape[-1] % 16:  # the kernel wants rows of the mask aligned to 16 elements
            attn_mask = F.pad(attn_mask, (0, 16 - attn_mask.shape[-1] % 16))[..., :length]
        attn_mask = attn_mask.expand(*query.shape[:3], length)
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale
    )[0]


def _math_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Two batched products and a softmax, as torch did before 2.0: what the runs of 2021 and 2022 trained with."""
    query, key, value, attn_mask = _autocast(query, key, value, attn_mask)
    batch, heads, length, width = query.shape
    queries = (query * (1 / math.sqrt(width) if scale is None else scale)).reshape(batch * heads, length, width)
    keys, values = (x.reshape(batch * heads, -1, x.shape[-1]) for x in (key, value))
    if attn_mask is None:
        weights = torch.bmm(queries, keys.transpose(-2, -1))
    else:
        mask = attn_mask if attn_mask.is_floating_point() else torch.zeros_like(attn_mask, dtype=query.dtype)
        mask = mask.expand(batch, heads, length, keys.shape[1]).reshape(batch * heads, length, -1)
        weights = torch.baddbmm(mask, queries, keys.transpose(-2, -1))
    return torch.bmm(F.softmax(weights, dim=-1), values).view(batch, heads, length, -1)


def put_on(model: nn.Module, device: str, dtype: torch.dtype | None) -> None:
    """Give a meta model uninitialised parameters and buffers on ``device``; call it under a FakeTensorMode.

    ``dtype`` is that of floating-point parameters and buffers (None: as they are). Shared tensors stay shared.
    """
    made: dict[int, Tensor] = {}

    def make(old: Tensor) -> Tensor:
        if id(old) not in made:
            kind = dtype if dtype is not None and old.is_floating_point() else old.dtype
            new = torch.empty(old.shape, dtype=kind, device=device)
            parameter = isinstance(old, nn.Parameter)
            made[id(old)] = nn.Parameter(new, requires_grad=old.requires_grad) if parameter else new
        return made[id(old)]

    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in list(table.items()):
                if tensor is not None:
                    table[name] = make(tensor)  # type: ignore[assignment]


def backward(loss: list[Tensor], on_gradient: Callable[[Tensor], None]) -> None:
    """Backward of the one tensor in ``loss`` (taken out of the list, so that nobody else holds it).

    A Python copy of torch's ``Engine::execute`` for one thread: the ready node with the highest sequence number runs
    next, AccumulateGrad before all others; nodes, and what they saved, are dropped as they run; gradients of a node
    with several consumers are added in place where nobody else holds the buffer.
    """
    original = torch._C._current_graph_task_id
    # non-reentrant checkpointing recomputes once per backward, which it knows by this number
    torch._C._current_graph_task_id = lambda: 1  # type: ignore[assignment]
    try:
        with torch.no_grad():
            _Walk(loss.pop(), on_gradient).run()
    finally:
        torch._C._current_graph_task_id = original  # type: ignore[assignment]


class _Walk:
    """The state of one backward: nodes not yet run, gradients that wait for them, and who is ready."""

    def __init__(self, root: Tensor, on_gradient: Callable[[Tensor], None]) -> None:
        self.on_gradient = on_gradient
        start: Any = root.grad_fn
        self.nodes: dict[int, Any] = {id(start): start}
        self.waiting_for: dict[int, int] = {}
        self.inputs: dict[int, dict[int, Tensor]] = {id(start): {0: torch.ones_like(root)}}
        self.ready = [(_priority(start), id(start))]
        stack = [start]
        while stack:
            for following, _ in stack.pop().next_functions:
                if following is None:
                    continue
                key = id(following)
                self.waiting_for[key] = self.waiting_for.get(key, 0) + 1
                if key not in self.nodes:
                    self.nodes[key] = following
                    stack.append(following)

    def run(self) -> None:
        while self.ready:
            _, key = heapq.heappop(self.ready)
            node, gradients = self.nodes.pop(key), self.inputs.pop(key, {})
            if type(node).__name__ == "AccumulateGrad":
                node.variable.grad = gradients.pop(0).detach()  # of one backward, so there is none yet
                self.on_gradient(node.variable)
            else:
                outputs = self._call(node, gradients)
                following = node.next_functions
                del node
                self._hand_on(following, outputs)

    @staticmethod
    def _call(node: Any, gradients: dict[int, Tensor]) -> list[Tensor | None]:
        arguments = [gradients.pop(slot, None) for slot in range(len(node._input_metadata))]
        # a torch.autograd.Function's node is called by apply
        call = node.apply if isinstance(node, torch.autograd.function.BackwardCFunction) else node
        outputs = call(*arguments)
        return list(outputs) if isinstance(outputs, tuple) else [outputs]

    def _hand_on(self, following: tuple, outputs: list[Tensor | None]) -> None:
        for slot, (node, index) in enumerate(following):
            if node is None:
                outputs[slot] = None
                continue
            key = id(node)
            if outputs[slot] is not None:
                self._add(key, index, node._input_metadata[index], outputs, slot)
            self.waiting_for[key] -= 1
            if self.waiting_for[key] == 0:
                heapq.heappush(self.ready, (_priority(node), key))

    def _add(self, key: int, index: int, meta: Any, outputs: list[Tensor | None], slot: int) -> None:
        gradient, outputs[slot] = outputs[slot], None
        assert gradient is not None
        if tuple(gradient.shape) != tuple(meta.shape):
            gradient = gradient.sum_to_size(tuple(meta.shape))
        if gradient.dtype != meta.dtype:
            gradient = gradient.to(meta.dtype)
        waiting = self.inputs.setdefault(key, {})
        if index not in waiting:
            waiting[index] = gradient
            return
        total = waiting.pop(index)
        # two references: the name and getrefcount's own; a third holder would see its values change
        alone = sys.getrefcount(total) <= 2 and total._use_count() <= 1  # type: ignore[attr-defined]
        waiting[index] = total.add_(gradient) if alone else total + gradient


def _priority(node: Any) -> float:
    return -math.inf if type(node).__name__ == "AccumulateGrad" else -node._sequence_nr()
