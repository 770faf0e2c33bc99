"""Markdown table and plot of sweeps, from their result files.

    python benchmarks/table.py FILE.json [FILE.json ...] [--out TABLE.md] [--plot PLOT.png]

The plot needs matplotlib.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import results as result_files

NAMES = {"eager": "eager", "graph": "decode graph", "overlapped": "overlapped", "piecewise": "piecewise"}


def table(document: dict[str, Any]) -> str:
    """One sweep as Markdown: TTFT and TPOT of every mode, the median and the best of the repeats."""
    measured, stamp = document["results"], document["stamp"]
    rows = {(row.get("tp", 1), row["mode"], row["batch"]): row for row in measured["rows"]}
    columns = list(dict.fromkeys((tp, mode) for tp, mode, _ in rows))
    batches = list(dict.fromkeys(batch for *_, batch in rows))
    several = any(tp > 1 for tp, _ in columns)
    names = [f"TP={tp} {NAMES[mode]}" if several else NAMES[mode] for tp, mode in columns]
    versions = ", ".join(f"{name} {version}" for name, version in stamp["versions"].items())
    head = [
        f"{measured['shape']}, {measured['dtype']}, {measured['input_len']} tokens in, {measured['output_len']} out, "
        f"attention {measured['attention']}; {stamp['device']}, {versions}, commit {stamp['commit']}; "
        "median (best), ms.",
        "",
        "| B | " + " | ".join(f"{what} {name}" for what in ("TTFT", "TPOT") for name in names) + " | equal |",
        "| --- |" + " --- |" * (2 * len(columns) + 1),
    ]
    lines = []
    for batch in batches:
        cells = [
            f"{rows[*column, batch][what]['median']:.{digits}f} ({rows[*column, batch][what]['best']:.{digits}f})"
            for what, digits in (("ttft_ms", 1), ("tpot_ms", 3))
            for column in columns
        ]
        counts = [rows[*column, batch]["sequences_equal_to_eager"] for column in columns]
        equal = ", ".join(f"{count}/{batch}" for count in counts if count is not None)
        lines.append(f"| {batch} | " + " | ".join(cells) + f" | {equal} |")
    foot = _of_ranks(measured) if several else [*_of_ties(measured), *_of_memory(measured["graph_memory"])]
    return "\n".join((*head, *lines, "", *foot)) + "\n"


def _of_ties(measured: dict[str, Any]) -> list[str]:
    margins = [row["largest_margin_at_a_difference"] for row in measured["rows"]]
    margin = max((margin for margin in margins if margin is not None), default=None)
    return [] if margin is None else [f"Largest margin of logits where a sequence leaves eager's: {margin:.3g}.", ""]


def _of_memory(memory: dict[str, Any]) -> list[str]:
    ratio = memory["all_bytes"] / memory["largest_bytes"]
    return [f"Memory of {len(memory['buckets'])} decode graphs: {ratio:.2f} times that of the largest alone."]


def _of_ranks(measured: dict[str, Any]) -> list[str]:
    """Compares the output of several ranks with that of one, and reports how the ranks ended."""
    lines = []
    for row in measured["rows"]:
        equal, margin = row["sequences_equal_to_one_rank"], row["largest_margin_at_a_parting"]
        if equal is None:
            continue
        difference = (
            ""
            if margin is None
            else f"; at the first other token the two largest logits differ by at most {margin:.3g}"
        )
        lines.append(
            f"- TP={row['tp']} {NAMES[row['mode']]}, B={row['batch']}: {equal} of {row['batch']} answers equal those "
            f"of TP=1{difference}."
        )
    for group in measured["groups"]:
        if group["tp"] > 1:
            lines.append(
                f"- TP={group['tp']}: all ranks had the same tokens: {_yes(measured, group['tp'])}. Graphs, group and "
                f"processes ended within {group['end_s']:.1f} s."
            )
    return lines


def _yes(measured: dict[str, Any], tp: int) -> str:
    return "yes" if all(row["ranks_alike"] for row in measured["rows"] if row["tp"] == tp) else "no"


def plot(documents: list[dict[str, Any]], path: Path) -> None:
    """TTFT and TPOT over the batch size, one line per mode and file."""
    try:
        import matplotlib
    except ImportError as error:
        raise SystemExit("the plot needs matplotlib: pip install matplotlib") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), constrained_layout=True)
    for axis, (what, label) in zip(axes, (("ttft_ms", "TTFT, ms"), ("tpot_ms", "TPOT, ms")), strict=True):
        for document in documents:
            rows = document["results"]["rows"]
            for tp, mode in dict.fromkeys((row.get("tp", 1), row["mode"]) for row in rows):
                kind = [row for row in rows if (row.get("tp", 1), row["mode"]) == (tp, mode)]
                points = sorted((row["batch"], row[what]["median"]) for row in kind)
                name = NAMES[mode] if tp == 1 else f"{NAMES[mode]}, TP={tp}"
                name += "" if len(documents) == 1 else f", {document['stamp']['commit']}"
                axis.plot(*zip(*points, strict=True), marker="o", label=name)
        axis.set(xlabel="batch size", ylabel=label, xscale="log", yscale="log")
        axis.grid(visible=True, which="both", alpha=0.3)
        axis.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(command: list[str] | None = None) -> None:
    """Prints the tables, or writes them to --out; draws the plot to --plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args(command)
    documents = [result_files.read(path, "sweep") for path in arguments.files]
    text = "\n".join(table(document) for document in documents)
    if arguments.out is None:
        print(text, end="")
    else:
        arguments.out.write_text(text)
    if arguments.plot is not None:
        plot(documents, arguments.plot)


if __name__ == "__main__":
    main()
