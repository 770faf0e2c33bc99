"""Records the experts that routers choose, and judges where two models choose differently.

A top-k choice is not continuous: a rounding error moves a token to another expert where two scores are nearly equal (a
flip). T tokens, E experts, k experts per token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What one router chose for the tokens of a run."""

    experts: torch.Tensor  # [T, k] int64, on the CPU
    num_experts: int
    inputs: torch.Tensor | None = None  # [T, N], the router's hidden states in the model's dtype; None: not known
    scores: torch.Tensor | None = None  # [T, E] fp32, scores or logits, of which the top k were chosen

    def followed_by(self, more: Choice) -> Choice:
        """The choices of this call's tokens, then those of the next call's."""
        return Choice(
            experts=torch.cat((self.experts, more.experts)),
            num_experts=self.num_experts,
            inputs=_cat(self.inputs, more.inputs),
            scores=_cat(self.scores, more.scores),
        )

    @property
    def unused(self) -> list[int]:
        """The experts that no token chose."""
        return sorted(set(range(self.num_experts)) - set(self.experts.flatten().tolist()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    """One token for which the two models chose different experts."""

    router: str  # HF's name
    token: int  # its position in the prompt
    ours: tuple[int, ...]  # the experts that only we chose
    theirs: tuple[int, ...]  # the experts that only the reference chose
    margin: float  # the largest difference of the reference's scores of the two
    rounding: float  # the largest difference that rounding errors explain

    @property
    def beyond_rounding(self) -> bool:
        return not self.margin <= self.rounding

    def __str__(self) -> str:
        ours, theirs = (", ".join(map(str, experts)) for experts in (self.ours, self.theirs))
        return (
            f"{self.router}: token {self.token} goes to expert {ours}, the reference's to {theirs}: "
            f"margin {self.margin:.2e}, rounding {self.rounding:.2e}"
        )


class ChoiceRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records each module's last top-k choice per call: of `torch.topk` over [T, E], or of the `topk_softmax` op.

    `running` is the stack of module calls, as `observed` keeps it.
    """

    def __init__(self, choices: dict[str, Choice], running: Sequence[tuple[str, tuple[Any, ...]]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._choices = choices
        self._running = running
        self._of_call: dict[str, Choice] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: PyTorch would import torch._dynamo at the first op, which takes seconds. None runs here."""
        return False

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = op(*args, **(kwargs or {}))
        if self._running and (choice := self._choice(op, args, output)) is not None:
            self._of_call[self._running[-1][0]] = choice
        return output

    def finish_call(self, name: str) -> None:
        """Keep the last choice of the module's call that has just returned."""
        choice = self._of_call.pop(name, None)
        if choice is not None:
            before = self._choices.get(name)
            self._choices[name] = choice if before is None else before.followed_by(choice)

    def _choice(self, op: Any, args: tuple[Any, ...], output: Any) -> Choice | None:
        if op in (torch.ops.aten.topk.default, torch.ops.xllm.topk_softmax.default) and args[0].ndim == 2:
            _, call = self._running[-1]
            inputs = next((x for x in call if isinstance(x, torch.Tensor) and x.is_floating_point()), None)
            known = inputs is not None and inputs.numel() == inputs.shape[-1] * args[0].shape[0]
            return Choice(
                experts=output[1].long().cpu(),
                num_experts=args[0].shape[1],
                inputs=inputs.flatten(0, -2).cpu() if inputs is not None and known else None,
                scores=args[0].float().cpu(),
            )
        return None


def match(ours: Mapping[str, Choice], theirs: Mapping[str, Choice]) -> dict[str, str]:
    """HF's router -> the module of ours that makes its choice: of its name, or else the nearest around or inside it."""
    found = {}
    for name, reference in theirs.items():
        near = [one for one in ours if one == name or name.startswith(f"{one}.") or one.startswith(f"{name}.")]
        fitting = [one for one in near if ours[one].experts.shape == reference.experts.shape]
        if fitting:
            found[name] = min(fitting, key=lambda one: abs(len(one) - len(name)))
    return found


def differing_rows(ours: torch.Tensor, theirs: torch.Tensor) -> list[int]:
    """The tokens whose sets of experts differ; both are [T, k]."""
    rows: list[int] = (ours.sort(-1).values != theirs.sort(-1).values).any(-1).nonzero()[:, 0].tolist()
    return rows


def judged(
    name: str,
    rows: Sequence[int],
    ours: torch.Tensor,
    theirs: torch.Tensor,
    scores: torch.Tensor,
    rounding: torch.Tensor,
) -> Iterator[Flip]:
    """The flips of `rows`. scores, rounding [T, E]: the reference's scores, and the largest error of each."""
    for row in rows:
        mine, their = set(ours[row].tolist()), set(theirs[row].tolist())
        only_ours, only_theirs = sorted(mine - their), sorted(their - mine)
        of_row, errors = scores[row].float(), rounding[row].float()
        # Another group's experts score -inf or 0 in the last top k of a grouped router.
        best = max(only_theirs, key=lambda expert: float(of_row[expert]))
        worst = min(only_ours, key=lambda expert: float(of_row[expert]))
        yield Flip(
            router=name,
            token=row,
            ours=tuple(only_ours),
            theirs=tuple(only_theirs),
            margin=float(of_row[best] - of_row[worst]),
            rounding=float(errors[best] + errors[worst]),
        )


def _cat(first: torch.Tensor | None, second: torch.Tensor | None) -> torch.Tensor | None:
    return None if first is None or second is None else torch.cat((first, second))
