"""Advantages of single tokens: a chain over what the agent said, in which what it was told does not exist."""

from __future__ import annotations

import torch
from torch import Tensor

# Entries of a row that `_recurrence` walks one after the other. Fewer make more levels, more make more steps in each.
_WIDTH = 8
_SOLVED_AT_ONCE = 64  # entries, as a system of linear equations


def gae(
    rewards: Tensor,
    values: Tensor,
    action_mask: Tensor,
    cu_seqlens: Tensor,
    *,
    gamma: float,
    lam: float | Tensor,
    bootstrap: Tensor | None = None,
    turn_ids: Tensor | None = None,
    turn_gamma: float = 1.0,
    turn_lam: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimates, and the returns that a critic learns.

    Time steps are actions, the sampled tokens. Observations neither receive an advantage nor discount, and what their
    values hold is never read. Sequences do not see one another.

    rewards      [tokens] float, in the judge's unit. One on an observation belongs to the last action before it in
                 its sequence; it is none if it is not finite, or if no action comes before it.
    values       [tokens] float, in the same unit: V of the state in which the token was chosen.
    action_mask  [tokens] bool, the sampled tokens, trainable or not.
    cu_seqlens   [sequences + 1] int, bounds of the packed sequences.
    gamma, lam   discount and decay from one action to the next, in [0, 1]; `lam` also as [sequences]. With one lambda
                 for the policy and another for the critic, take the advantages of one call and the returns of another:
                 Yuan et al. 2025 (arXiv:2503.01491), "Decoupled-GAE".
    bootstrap    [sequences] V of the state after the last action, 0 where the sequence truly ended; default: all 0.
    turn_ids     [tokens] int. From the last action of a turn to the first of the next, `turn_gamma` and `turn_lam`
                 (default: `lam`) hold in place of `gamma` and `lam`; the bootstrap is always discounted by `gamma`.
    Returns      advantages and returns, [tokens] each, in the dtype of `values` but at least float32, without gradient;
                 computed in float64. Exactly 0 on observations. An action's value or reward that is not finite spoils
                 the actions before it, in its own sequence alone.

    A_t = delta_t + gamma lam A_{t+1}, delta_t = r_t + gamma V_{t+1} - V_t, R_t = A_t + V_t: Schulman et al. 2016
    (arXiv:1506.02438), eq. 16.

    Raises ValueError for shapes that do not fit, gamma or lambda outside [0, 1], and settings of turns without ids.
    """
    num_tokens, bounds = len(values), cu_seqlens.tolist()
    _check_bounds(bounds, num_tokens)
    _check_shapes(num_tokens, rewards=rewards, values=values, action_mask=action_mask, turn_ids=turn_ids)
    _check_shapes(len(bounds) - 1, bootstrap=bootstrap, lam=lam if isinstance(lam, Tensor) else None)
    _check_fractions(gamma=gamma, lam=lam, turn_gamma=turn_gamma, turn_lam=turn_lam)
    if turn_ids is None and (turn_gamma != 1.0 or turn_lam is not None):
        raise ValueError("turn_gamma and turn_lam hold between turns; give turn_ids, or leave them out")

    actions = action_mask.nonzero().squeeze(1)
    firsts = torch.searchsorted(actions, cu_seqlens.to(actions))  # [sequences + 1] each one's first action
    acting, last = _last_actions(firsts)
    discount = values.new_tensor(gamma, dtype=torch.float64).expand(len(actions))
    decay = torch.as_tensor(lam).to(discount)
    decay = decay.repeat_interleave(firsts.diff()) if decay.ndim else decay.expand(len(actions))
    if turn_ids is not None:
        between = _turn_ends(turn_ids[actions])
        discount = discount.index_fill(0, between, turn_gamma)
        decay = decay.index_fill(0, between, turn_lam) if turn_lam is not None else decay

    v = values.detach().index_select(0, actions).double()
    deltas = _action_rewards(rewards.detach(), actions, firsts, cu_seqlens).sub_(v)
    at_end = deltas[last]
    if bootstrap is not None:
        at_end.add_(bootstrap.detach().to(v)[acting], alpha=gamma)
    deltas[:-1].addcmul_(discount[:-1], v[1:])
    deltas[last] = at_end
    _chain((discount * decay).index_fill_(0, last, 0.0), deltas)  # are advantages now

    zeros = torch.zeros_like(values, dtype=torch.promote_types(values.dtype, torch.float32))
    returns = zeros.masked_scatter(action_mask, v.add_(deltas).to(zeros))
    return zeros.masked_scatter_(action_mask, deltas.to(zeros)), returns


def length_adaptive_lam(action_mask: Tensor, cu_seqlens: Tensor, *, alpha: float = 0.05) -> Tensor:
    """A lambda for each sequence, so that a reward reaches back over a like part of it however long it is.

    action_mask  [tokens] bool. cu_seqlens  [sequences + 1] int.
    alpha        1 / alpha actions are the length up to which lambda is 0.
    Returns      [sequences] float64, max(0, 1 - 1 / (alpha length)) with the length in actions; 0 without any.

    Yue et al. 2025, "VAPO" (arXiv:2504.05118), "Length-adaptive GAE".
    """
    positions = action_mask.nonzero().squeeze(1)
    lengths = torch.searchsorted(positions, cu_seqlens.to(positions)).diff().double()
    return (1 - 1 / (alpha * lengths)).clamp(min=0.0)


def _last_actions(firsts: Tensor) -> tuple[list[int], Tensor]:
    """The sequences that act at all, and where among the actions the last one of each stands."""
    bounds = firsts.tolist()
    acting = [n for n in range(len(bounds) - 1) if bounds[n] < bounds[n + 1]]
    return acting, torch.tensor([bounds[n + 1] - 1 for n in acting], dtype=torch.long, device=firsts.device)


def _turn_ends(turns: Tensor) -> Tensor:
    """Where the next one differs; those at the end of a sequence matter to nobody."""
    return (turns[:-1] != turns[1:]).nonzero().squeeze(1)


def _action_rewards(rewards: Tensor, actions: Tensor, firsts: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[actions] float64: each action's own reward, and those on observations that follow it."""
    own = rewards.index_select(0, actions)
    if own.count_nonzero() == rewards.count_nonzero():
        return own.double()
    stray = rewards.index_fill(0, actions, 0.0)
    stray = ((stray != 0) & stray.isfinite()).nonzero().squeeze(1)
    action = torch.searchsorted(actions, stray, right=True) - 1
    sequence = torch.searchsorted(cu_seqlens.to(stray), stray, right=True) - 1
    owned = action >= firsts[sequence]
    return own.double().index_add_(0, action[owned], rewards[stray[owned]].double())


def _chain(coefficients: Tensor, x: Tensor) -> None:
    """`_recurrence`, in which 0 times what is not finite is 0."""
    if x.sum().isfinite():
        _recurrence(coefficients, x)
    else:
        broken = ~x.isfinite()
        spoiled = broken.double()
        _recurrence((coefficients != 0).double(), spoiled)
        _recurrence(coefficients, x.masked_fill_(broken, 0.0))
        x.masked_fill_(spoiled != 0, torch.nan)


def _recurrence(coefficients: Tensor, x: Tensor) -> None:
    """Make x_t what solves y_t = x_t + c_t y_{t+1}, with 0 after the end; [n] float64 each, both are overwritten.

    They are cut into rows, solved side by side as if nothing followed them. The starts of the rows then obey the same
    recurrence, with the product of each row's coefficients, and complete the others. Products may underflow to 0, which
    is what they are then worth; nothing is divided by them.
    """
    if len(x) < 2:
        return
    if len(x) <= _SOLVED_AT_ONCE:
        system = torch.diag_embed(coefficients[:-1].neg(), offset=1)
        x.copy_(torch.linalg.solve_triangular(system, x[:, None], upper=True, unitriangular=True).squeeze(1))
        return
    rows, rest = divmod(len(x), _WIDTH)
    y, c = x[rest:].view(rows, _WIDTH), coefficients[rest:].view(rows, _WIDTH)
    y_of, c_of = y.unbind(1), c.unbind(1)
    for k in range(_WIDTH - 2, -1, -1):
        y_of[k].addcmul_(c_of[k], y_of[k + 1])
        c_of[k].mul_(c_of[k + 1])
    _recurrence(c_of[0], y_of[0])
    y[:-1, 1:].addcmul_(c[:-1, 1:], y[1:, :1])
    for k in range(rest - 1, -1, -1):
        x[k].addcmul_(coefficients[k], x[k + 1])


def _check_shapes(length: int, **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.shape != (length,):
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected ({length},)")


def _check_bounds(bounds: list[int], num_tokens: int) -> None:
    if not bounds or bounds[0] != 0 or bounds[-1] != num_tokens or bounds != sorted(bounds):
        raise ValueError(f"cu_seqlens must rise from 0 to the number of tokens, {num_tokens}; got {bounds[:8]}")


def _check_fractions(**settings: float | Tensor | None) -> None:
    for name, value in settings.items():
        inside = value is None or (value >= 0) & (value <= 1)
        if not (inside.all() if isinstance(inside, Tensor) else inside):
            raise ValueError(f"{name} must lie in [0, 1], got {value}")
