"""``disco-plan trace``: what a model's activations take, found on fake tensors."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

from disco_ds.cli.parser import Parser
from disco_ds.cli.plan import count
from disco_ds.errors import ConfigError
from disco_ds.planner.coefficients import Coefficients
from disco_ds.planner.models import ModelSource, to_stderr

MIB = 2**20


def run_trace(words: Sequence[str]) -> int:
    """The sub-command; returns its exit status.

    Raises:
        ConfigError: an unknown model or option.
    """
    parser = Parser(
        prog="disco-plan trace",
        description="Trace a model's forward and backward without a GPU and say its coefficients: A(b), the highest of "
        "activations, and E(b), what is alive when forward has ended, for b pairs; in MiB, the batch itself included.",
    )
    parser.add_argument("models", nargs="+", metavar="MODEL", help="open_clip names or JSON files")
    parser.add_argument("--precision", choices=["bf16", "amp", "fp32"], default="amp")
    parser.add_argument("--checkpointing", default="none", metavar="none|full|every:K|ops|offload")
    parser.add_argument("--attention", choices=["flash", "math"], default="flash")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="whose operations (default: cuda)")
    parser.add_argument("--image-size", type=count, metavar="PX")
    parser.add_argument("--context-length", type=count, metavar="TOKENS")
    parser.add_argument("--no-self-check", action="store_true", help="do not check tracing itself first")
    arguments = parser.parse_args(list(words))
    if not re.fullmatch(r"none|full|every:[1-9]\d*|ops|offload", arguments.checkpointing):
        raise ConfigError(f"--checkpointing {arguments.checkpointing}: expected none, full, every:K, ops or offload")
    from disco_ds.planner.tracing.selfcheck import TraceError, self_check

    if not arguments.no_self_check:
        try:
            found = self_check()
        except TraceError as error:
            to_stderr(f"disco-plan: {error}")
            return 1
        to_stderr("self-check: " + ", ".join(f"{name} {value:.2%}" for name, value in found.items()))
    for name in arguments.models:
        started = time.monotonic()
        sizes = {"image_size": arguments.image_size, "context_length": arguments.context_length}
        source = ModelSource(name, lambda _: None, sizes)
        source.known = None  # traced now, shipped or not
        model = source.get(arguments.precision, arguments.checkpointing, arguments.attention, arguments.device)
        print(describe(model), f"({time.monotonic() - started:.1f} s)")
    return 0


def describe(model: Coefficients) -> str:
    """A model's only trace in two lines."""
    (key, found), size = next(iter(model.traces.items())), model.input_bytes
    peak, end = affine(found.peak), affine(found.end)
    return (
        f"{model.name} {key}: A = {peak[0]:.2f} b + {peak[1]:.0f} MiB, E = {end[0]:.2f} b + {end[1]:.0f} MiB\n"
        f"  {model.parameters / 1e6:.1f} M parameters (image {model.image_parameters / 1e6:.1f} M), features of "
        f"{model.embed_dim}, batch {size / MIB:.3f} MiB a pair, forward {found.forward_flops / 1e9:.1f} GFLOP a pair"
    )


def affine(bytes_of: object) -> tuple[float, float]:
    """Slope and intercept in MiB of a function of the batch, taken where the batch is large."""
    low, high = (bytes_of(batch) / MIB for batch in (2000, 4000))  # type: ignore[operator]
    slope = (high - low) / 2000
    return slope, low - 2000 * slope
