"""The command line. Heavy imports are inside the commands: `attncheck --help` must be quick."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import click

from attncheck import __version__

HELD, VIOLATED, ERROR, NOT_JUDGED = 0, 1, 2, 3

EXIT_CODES = """\b
Exit codes, in this order of precedence:
  2  a usage, loading or input error, or an error of attncheck's own
  1  a property is violated
  3  a candidate had nothing judged, or a required output is missing
  0  every property that was judged holds
"""

F = TypeVar("F", bound=Callable[..., Any])


def _loading_options(function: F) -> F:
    """The options that say how a TARGET becomes a candidate."""
    for option in reversed(
        [
            click.option("--like", metavar="CONVENTION", help="Calling convention of a plain callable (see `list`)."),
            click.option("--supports", multiple=True, metavar="FEATURE", help="It takes this feature after all."),
            click.option("--lacks", multiple=True, metavar="FEATURE", help="It declines this feature."),
            click.option("--forward-only", is_flag=True, help="It has no gradients."),
            click.option("--device", default="cpu", show_default=True, help="Where its tensors are put."),
            click.option("--isolate", is_flag=True, help="Run it in a child process: a crash or hang is a verdict."),
            click.option("--timeout", type=float, metavar="S", help="Seconds per case with --isolate.  [default: 60]"),
        ]
    ):
        function = option(function)
    return function


def _loading(options: dict[str, Any]) -> dict[str, Any]:
    """What was given of the loading options, as fields of a Selection."""
    from attncheck.selection import words

    return {**options, "supports": words(options["supports"]), "lacks": words(options["lacks"])}


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Example: attncheck verify my_kernel.py:attention --like sdpa",
)
@click.version_option(__version__, prog_name="attncheck")
def cli() -> None:
    """Judge attention kernels against an exact oracle, element by element."""


@cli.command(
    epilog=f"""\b
Examples:
  attncheck verify torch-sdpa-math
  attncheck verify my_kernel.py:attention --like sdpa --dtype bfloat16
  attncheck verify my_package.kernels:fwd --like flash_attn --forward-only --block 128

{EXIT_CODES}"""
)
@click.argument("targets", nargs=-1, required=True, metavar="TARGET...")
@_loading_options
@click.option("--dtype", multiple=True, metavar="NAME", help="Judge only this dtype; may be repeated.")
@click.option("--property", "properties", multiple=True, metavar="NAME", help="Judge only this property (see `list`).")
@click.option("--examples", type=int, metavar="N", help="Cases per candidate and property, over all dtypes.")
@click.option("--seconds", type=float, metavar="S", help="Stop drawing cases after about S seconds.")
@click.option("--seed", type=int, metavar="N", help="Which cases are drawn.  [default: 0]")
@click.option("--random", "random_seed", is_flag=True, help="Draw the seed, and print it.")
@click.option("--block", metavar="N[,N]", help="The kernel's own block sizes: lengths are drawn around them.")
@click.option(
    "--require", multiple=True, metavar="OUTPUTS", help="Outputs that must be judged, as o,lse,dq,dk,dv,dbias."
)
@click.option("--fail-fast", is_flag=True, help="Stop at the first violation.")
@click.option("-n", "processes", type=click.IntRange(min=0), metavar="N", help="Processes.  [default: one per core]")
@click.option("--save", metavar="DIR", help="Where failing cases go.  [default: .attncheck/failures]")
@click.option("--waivers", metavar="FILE", help="Violations that are settled, one a line (see the README).")
@click.option("--strict-waivers", is_flag=True, help="A waiver that is stale fails the run: exit code 1.")
@click.option("--json", "json_file", metavar="FILE", help="Write the machine-readable report; - is standard output.")
def verify(
    targets: tuple[str, ...],
    properties: tuple[str, ...],
    dtype: tuple[str, ...],
    examples: int | None,
    seconds: float | None,
    seed: int | None,
    random_seed: bool,
    block: str | None,
    require: tuple[str, ...],
    fail_fast: bool,
    processes: int | None,
    save: str | None,
    waivers: str | None,
    strict_waivers: bool,
    json_file: str | None,
    **loading: Any,
) -> None:
    """Judge kernels on drawn cases, and save what fails.

    TARGET is a built-in candidate, package.module:attribute, path/to/file.py:attribute, or an entry
    point in the group attncheck.candidates. The attribute is an attncheck.Candidate, or a callable
    that follows the convention given with --like.
    """
    from attncheck import launching, showing
    from attncheck.selection import DEFAULT_SAVE, Selection, block_sizes, words

    if random_seed and seed is not None:
        raise click.UsageError("--seed and --random exclude each other; give one")
    if random_seed:
        import secrets

        seed = secrets.randbelow(2**32)
    selection = Selection(
        targets=targets,
        **_loading(loading),
        dtypes=words(dtype),
        properties=words(properties),
        examples=examples,
        seconds=seconds,
        seed=seed or 0,
        block=block_sizes(block),
        require=words(require),
        save=save or DEFAULT_SAVE,
        waivers=waivers,
        strict_waivers=strict_waivers,
    )
    selection.check_names()
    count = launching.default_processes() if processes is None else max(processes, 1)
    out = showing.Output(json_file)
    out.say(f"$ {launching.pytest_command(selection, count, fail_fast)}\n")
    with showing.progress() as progress:
        document = launching.run(selection, processes=count, fail_fast=fail_fast, progress=progress)
    out.report(document)
    sys.exit(document["exit_code"])


@cli.command(
    epilog=f"""\b
Example:
  attncheck replay .attncheck/failures/dq-3f2a91c4.json --candidate my_kernel.py:attention --like sdpa

{EXIT_CODES}"""
)
@click.argument("fixture")
@click.option("--candidate", "target", required=True, metavar="TARGET", help="The kernel to judge on the saved case.")
@_loading_options
def replay(fixture: str, target: str, **loading: Any) -> None:
    """Judge a kernel again on a case that was saved.

    Nothing that FIXTURE says is run: the kernel is always the one named with --candidate.
    """
    from attncheck import showing
    from attncheck.fixtures import read
    from attncheck.properties.replay import replay as judge_again
    from attncheck.selection import Selection

    record = read(fixture)
    candidate = Selection(targets=(target,), **_loading(loading)).load(target)
    sys.exit(showing.show_replay(record, candidate, judge_again(record, candidate)))


@cli.command(
    epilog="""\b
Examples:
  attncheck power --quick
  attncheck power --faults K06,B039 --seeds 3
  attncheck power --json power.json --markdown docs/POWER.md

Exit code: 0 every fault is caught under every seed and no right kernel is accused, 1 otherwise, 2 an error."""
)
@click.option("--faults", multiple=True, metavar="NAMES", help="Only these: kinds as K06, ids as B039, reports.")
@click.option("--seeds", type=click.IntRange(min=1), metavar="N", help="Hunt under the seeds 0 to N-1.  [default: 10]")
@click.option("--examples", type=click.IntRange(min=1), metavar="N", help="At most N per fault.  [default: verify's]")
@click.option("--quick", is_flag=True, help="Two seeds, 400 examples, shrinking under one seed.")
@click.option("-n", "processes", type=click.IntRange(min=1), metavar="N", help="Processes.  [default: one per core]")
@click.option("--json", "json_file", metavar="FILE", help="Write the report as JSON; - is standard output.")
@click.option("--markdown", "markdown_file", metavar="FILE", help="Write the report as a page of Markdown.")
def power(
    faults: tuple[str, ...],
    seeds: int | None,
    examples: int | None,
    quick: bool,
    processes: int | None,
    json_file: str | None,
    markdown_file: str | None,
) -> None:
    """Measure what the suite catches: plant every fault of the zoo, and hunt it.

    For each fault: the property that catches it, after how many examples, how small the case is after
    shrinking, and which public checking habits catch it too. Right kernels are judged beside them, unless
    --faults says which are wanted: a violation there is a false alarm.
    """
    from attncheck import launching, power_report, powering, showing
    from attncheck.selection import words

    chosen = powering.plan(words(faults), seeds=seeds, examples=examples, quick=quick)
    out = showing.Output(json_file)
    page = None if markdown_file is None else showing.writable(markdown_file, "--markdown")
    count = launching.default_processes() if processes is None else processes
    with showing.progress() as progress:
        document = powering.measure(chosen, processes=count, progress=progress)
    out.say(power_report.render(document, showing.width()).rstrip("\n"))
    out.write(document)
    if page is not None:
        showing.write(page, power_report.markdown(document), "--markdown")
    alarms = any(row["alarms"] for row in document["right"])
    sys.exit(VIOLATED if document["summary"]["missed"] or alarms else HELD)


@cli.command("list", epilog="Example: attncheck list properties")
@click.argument("what", required=False, type=click.Choice(["candidates", "properties", "conventions", "features"]))
def list_(what: str | None) -> None:
    """List candidates, properties, calling conventions and the features cases may use."""
    from attncheck import showing

    showing.show_list(what)


@cli.command(epilog="Example: attncheck exact .attncheck/failures/dq-3f2a91c4.json --digits 25")
@click.argument("fixture")
@click.option(
    "--digits", type=click.IntRange(1, 1000), default=20, show_default=True, metavar="N", help="Significant digits."
)
def exact(fixture: str, digits: int) -> None:
    """Print the exact answer of a saved case, every digit certain."""
    from attncheck import showing
    from attncheck.fixtures import read

    showing.show_exact(read(fixture), digits)


@cli.command(epilog="Example: attncheck trace .attncheck/failures/dq-3f2a91c4.json --row 0,0,1 --block 2")
@click.argument("fixture")
@click.option("--row", default="0,0,0", show_default=True, metavar="B,H,I", help="Batch entry, query head, query row.")
@click.option("--block", metavar="N[,N]", help="Key blocks, the last repeated.  [default: as the case was presented]")
@click.option(
    "--digits", type=click.IntRange(1, 30), default=10, show_default=True, metavar="N", help="Significant digits."
)
def trace(fixture: str, row: str, block: str | None, digits: int) -> None:
    """Print the exact state of online softmax after each block of keys of one row.

    A kernel that keeps (m, l, a) can be compared with it block by block.
    """
    from attncheck import showing
    from attncheck.fixtures import read
    from attncheck.selection import block_sizes

    try:
        b, h, i = (int(word) for word in row.split(","))
    except ValueError:
        raise click.UsageError(f"--row is {row!r}; it must be three integers B,H,I") from None
    showing.show_trace(read(fixture), (b, h, i), block_sizes(block), digits)


def main() -> None:
    """Run the command line. Whatever happens, the exit code is one of 0, 1, 2 and 3."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without the letters gets question marks
    try:
        cli.main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(ERROR)
    except (KeyboardInterrupt, click.Abort):
        click.echo("interrupted", err=True)
        sys.exit(ERROR)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(ERROR)
    except Exception as error:
        # ours (SelectionError, LoadError, FixtureError, CaseError) are one sentence for whoever asked
        if isinstance(error, ValueError) and type(error).__module__.startswith("attncheck."):
            click.echo(f"error: {error}", err=True)
        else:
            import traceback

            traceback.print_exc()
            click.echo("error: this is a fault of attncheck, not of the kernel", err=True)
        sys.exit(ERROR)
    sys.exit(HELD)
