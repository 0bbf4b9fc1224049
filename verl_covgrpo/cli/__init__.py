"""The verl-covgrpo command."""

from __future__ import annotations

import enum
import os
from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer(
    help="Covariance-aware GRPO and its family, as a plugin for verl.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class DemoModel(str, enum.Enum):
    """What the demo trains."""

    tiny = "tiny"
    smollm2 = "smollm2"


@app.command()
def demo(
    method: Annotated[
        str, typer.Option(help="What to train with: grpo, or any method of this package.")
    ] = "covgrpo",
    compare: Annotated[
        bool, typer.Option("--compare", help="Train with grpo too, the same seed, one plot.")
    ] = False,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Training steps.", show_default="40; smollm2: 6")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of prompts and sampling.")] = 0,
    ranks: Annotated[int, typer.Option(min=1, max=2, help="Actor ranks, each with a vLLM.")] = 1,
    model: Annotated[DemoModel, typer.Option(help="What to train.")] = DemoModel.tiny,
) -> None:
    """Train a small language model through the stock verl pipeline, without a GPU."""
    # Before torch is loaded: threads that spin while they wait crawl on a busy machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TQDM_DISABLE", "1")  # one progress bar, ours
    from verl_covgrpo import MethodError, registry
    from verl_covgrpo.demo.launch import RunFailed
    from verl_covgrpo.demo.run import check_installed, run_demo

    console = Console()
    try:
        if method != "grpo":
            registry.get(method)
        methods = ["grpo", method] if compare and method != "grpo" else [method]
        check_installed()
        run_demo(methods, model.value, steps, seed, ranks, console)
    except KeyboardInterrupt:
        console.print("stopped; no process of the run is left")
        raise typer.Exit(130) from None
    except MethodError as error:
        console.print(str(error), style="red", markup=False, soft_wrap=True)
        raise typer.Exit(2) from None
    except (RunFailed, RuntimeError) as error:
        console.print(f"the demo failed: {error}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None


@app.command()
def doctor(
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Ask every node of the running Ray cluster.")
    ] = False,
) -> None:
    """Check that the plugin is where verl will look for it. Exit status 1 where it is not."""
    from verl_covgrpo.cli.doctor import examine

    raise typer.Exit(examine(cluster, Console()))
