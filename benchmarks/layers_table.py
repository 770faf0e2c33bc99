"""Tables of layers-*.json: latent attention and Gated DeltaNet per layer, as Markdown."""

from __future__ import annotations

from typing import Any

_LATENT = ("triton", "flashinfer fa2", "flashinfer fa3")


def table(results: dict[str, Any]) -> str:
    """The tables of one result file of benchmarks/layers.py."""
    read, rate = results["read_tb_s"], results["dense_tflop_s"]

    def least(row: dict[str, Any]) -> float:
        return float(max(row["bytes"] / read / 1e6, row.get("operations", 0) / rate / 1e6))

    def cells(row: dict[str, Any], names: tuple[str, ...]) -> list[str]:
        times = {name: us for name in names if (us := row["us"].get(name)) is not None}
        best = min(times.values())
        return [
            "-" if name not in times else f"**{us:.1f}**" if (us := times[name]) == best else f"{us:.1f}"
            for name in names
        ] + [f"{least(row):.1f}"]

    def lines(header: list[str], rows: list[list[str]]) -> str:
        return "\n".join(f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *rows)) + "\n"

    latent = lines(
        ["heads", "B", "context", *_LATENT, "least"],
        [
            [str(row["num_heads"]), str(row["num_seqs"]), str(row["context"]), *cells(row, _LATENT)]
            for row in results["latent_decode"]
        ],
    )
    prompts = lines(
        ["heads", "step", *_LATENT, "least"],
        [[str(row["num_heads"]), row["name"], *cells(row, _LATENT)] for row in results["latent_prompts"]],
    )
    decode = lines(
        ["B", "triton", "torch", "least"],
        [[str(row["num_seqs"]), *cells(row, ("triton", "torch"))] for row in results["state_decode"]],
    )
    chunks = lines(
        ["step", "fla", "torch", "least"],
        [[row["name"], *cells(row, ("fla", "torch"))] for row in results["state_prompts"]],
    )
    return "\n".join(
        (
            f"`least` counts {read:.2f} TB/s of reading and {rate:.0f} TFLOP/s of a dense product. Times are in us.\n",
            "Latent attention, decode:\n",
            latent,
            "Latent attention, other steps:\n",
            prompts,
            "Gated DeltaNet, decode:\n",
            decode,
            "Gated DeltaNet, other steps:\n",
            chunks,
        )
    )
