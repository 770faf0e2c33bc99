"""Markdown table and plot of sweeps, from their result files.

    python benchmarks/table.py FILE.json [FILE.json ...] [--out TABLE.md] [--plot PLOT.png]

The plot needs matplotlib.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import results as result_files

NAMES = {"eager": "eager", "graph": "decode graph", "piecewise": "piecewise"}


def table(document: dict[str, Any]) -> str:
    """One sweep as Markdown: TTFT and TPOT of every mode, the median and the best of the repeats."""
    measured, stamp = document["results"], document["stamp"]
    rows = {(row["mode"], row["batch"]): row for row in measured["rows"]}
    modes = list(dict.fromkeys(mode for mode, _ in rows))
    batches = list(dict.fromkeys(batch for _, batch in rows))
    versions = ", ".join(f"{name} {version}" for name, version in stamp["versions"].items())
    head = [
        f"{measured['shape']}, {measured['dtype']}, {measured['input_len']} tokens in, {measured['output_len']} out, "
        f"attention {measured['attention']}; {stamp['device']}, {versions}, commit {stamp['commit']}; "
        "median (best), ms.",
        "",
        "| B | " + " | ".join(f"{what} {NAMES[mode]}" for what in ("TTFT", "TPOT") for mode in modes) + " | equal |",
        "| --- |" + " --- |" * (2 * len(modes) + 1),
    ]
    lines = []
    for batch in batches:
        cells = [
            f"{rows[mode, batch][what]['median']:.{digits}f} ({rows[mode, batch][what]['best']:.{digits}f})"
            for what, digits in (("ttft_ms", 1), ("tpot_ms", 3))
            for mode in modes
        ]
        counts = [rows[mode, batch]["sequences_equal_to_eager"] for mode in modes]
        equal = ", ".join(f"{count}/{batch}" for count in counts if count is not None)
        lines.append(f"| {batch} | " + " | ".join(cells) + f" | {equal} |")
    memory = measured["graph_memory"]
    ratio = memory["all_bytes"] / memory["largest_bytes"]
    foot = f"Memory of {len(memory['buckets'])} decode graphs: {ratio:.2f} times that of the largest alone."
    return "\n".join((*head, *lines, "", foot)) + "\n"


def plot(documents: list[dict[str, Any]], path: Path) -> None:
    """TTFT and TPOT over the batch size, a line for every mode of every file."""
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
            for mode in dict.fromkeys(row["mode"] for row in rows):
                points = sorted((row["batch"], row[what]["median"]) for row in rows if row["mode"] == mode)
                name = NAMES[mode] if len(documents) == 1 else f"{NAMES[mode]}, {document['stamp']['commit']}"
                axis.plot(*zip(*points, strict=True), marker="o", label=name)
        axis.set(xlabel="batch size", ylabel=label, xscale="log", yscale="log")
        axis.grid(visible=True, which="both", alpha=0.3)
        axis.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(command: list[str] | None = None) -> None:
    """Prints or writes the tables, and the plot where asked."""
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
