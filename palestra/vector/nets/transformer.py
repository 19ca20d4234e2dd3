"""The multi-agent transformer (MAT; Wen et al., 2022): an encoder over the observations of a team computes values, and
a decoder chooses the actions of the seats one after another, each given the actions before it.

Seats that do not act (dead units, or seats that wait for their turn) are left out: the others attend neither to them
nor to their actions, as if the team were smaller.

With `attention_type: retention`, retention replaces attention in encoder and decoder, as in Sable (Mahjoub et al.,
2024). It spans the seats of one step; with a `retention_decay` also the earlier steps of the episode: each layer keeps
a state from step to step (`palestra.vector.nets.retention`). The recurrent state of a team is the states of all its
layers, divided evenly over the rows of its seats.

Shapes: `P` members (teams of a stack), `T` steps, `R` = G*S rows, `G` games, `S` seats of a team, `H` units, `O`
outputs, `A` numbers of an encoded action.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from palestra.envs.vector_base import Space
from palestra.vector.nets.attention import (
    BlockShape,
    FeedForward,
    Past,
    SelfAttentionBlock,
    attention_mask,
    make_attention,
    rowwise,
)
from palestra.vector.nets.dense import GAIN, LayerNorm, Linear
from palestra.vector.nets.heads import encode_actions, encoding_size, make_head
from palestra.vector.nets.layers import Layout, Net, NetConfig, Team
from palestra.vector.nets.retention import StepMemory, head_decays

# outputs [P, G, O] and the number of a seat within the team -> its actions [P, G, ...] and log-probabilities [P, G]
SeatSelector = Callable[[Tensor, int], tuple[Tensor, Tensor | None]]


class DecoderBlock(nn.Module):
    """A block of the decoder: self-attention over the actions before a seat, then attention of the seat's encoding to
    its result, then a feed-forward layer, each added to its input and normalised (Wen et al., 2022, section 3.2)."""

    def __init__(self, shape: BlockShape, generators: Sequence[torch.Generator]) -> None:
        super().__init__()
        self.to_actions = make_attention(shape, generators)
        self.to_encoding = make_attention(shape, generators)
        self.feed_forward = FeedForward(shape.units, shape.activation, generators)
        self.norms = nn.ModuleList(LayerNorm(shape.units, len(generators)) for _ in range(3))

    def forward(
        self, x: Tensor, encoded: Tensor, mask: Tensor | None, past: tuple[Past, Past] = (None, None)
    ) -> Tensor:
        """Returns the next features [P, G, S, H] from features of the actions `x` and encodings of
        the seats `encoded`, both [P, G, S, H]. `past` is what both attention layers store of
        earlier seats, in sequential decoding, or of earlier steps."""
        x = rowwise(self.norms[0], x + self.to_actions(x, x, mask, past[0]))
        x = rowwise(self.norms[1], encoded + self.to_encoding(encoded, x, mask, past[1]))
        return rowwise(self.norms[2], x + self.feed_forward(x))


class MultiAgentTransformer(Net):
    """P transformers of teams of `team_size` seats: from observations to values, and to each seat's outputs given the
    actions of the seats before it. The hidden layers of `config` embed observations; the last one sets the units of the
    transformer. With a `retention_decay` the recurrent state has W = `recurrent_units` numbers per row. Raises
    ValueError if `config` sets a GRU or rounds of communication."""

    plays_team = True

    def __init__(
        self,
        observation_shape: tuple[int, ...],
        space: Space,
        config: NetConfig,
        generators: Sequence[torch.Generator],
        gain: float = 1.0,
        team_size: int = 1,
        layout: Layout | None = None,
    ) -> None:
        if config.gru_units or config.communication_rounds:
            raise ValueError(
                "gru_units, communication_rounds: the transformer of algorithm mat has no GRU, and its seats exchange "
                "information by attention: leave these settings out. For memory of earlier steps set attention_type: "
                "retention and a retention_decay"
            )
        if config.network is not None:
            raise ValueError(
                f"network: {config.network.type}: algorithm mat has a network of its own, the transformer: leave "
                "network out, or use another algorithm (mappo)"
            )
        super().__init__(observation_shape, make_head(space).outputs, config, generators, gain, True, team_size, layout)
        units = config.hidden[-1]
        heads = config.attention_heads
        activation = config.activation
        blocks = range(config.attention_blocks)
        shape = BlockShape(units, heads, activation, config.attention_type)
        self.action_space = space
        self.activation = activation
        self.encoder = nn.ModuleList(SelfAttentionBlock(shape, generators) for _ in blocks)
        self.decoder = nn.ModuleList(DecoderBlock(shape, generators) for _ in blocks)
        self.action_embedding = Linear(encoding_size(space) + 1, units, GAIN[activation], generators)
        self.before_head = Linear(units, units, GAIN[activation], generators)
        self.before_value = Linear(units, units, GAIN[activation], generators)
        self.norms = nn.ModuleList(LayerNorm(units, len(generators)) for _ in range(2))  # of observations and actions
        self.retention_decay = config.retention_decay
        self.state_shape = (3 * len(blocks), heads, units // heads, units // heads)  # of a team: encoder, then decoder
        self.recurrent_units = 0
        if config.retention_decay:
            self.recurrent_units = math.ceil(math.prod(self.state_shape) / team_size)

    # ---- memory of earlier steps

    def _memories(self, recurrent_state: Tensor | None, is_first: Tensor | None, acts: Tensor) -> list[StepMemory]:
        """Returns the memory of each layer, those of the encoder first (none if the network has no
        memory), from the recurrent state [P, R, W] before the first step (None: zeros), the first
        steps of episodes [P, T, R] (None: there are none) and the seats that act [P, T, R]."""
        if not self.recurrent_units:
            return []
        P, T, R = acts.shape
        G = R // self.team_size
        size = math.prod(self.state_shape)
        if is_first is None:
            is_first = torch.zeros_like(acts)
        if recurrent_state is None:
            recurrent_state = self.initial_state(P, R)
        first = is_first.view(P, T, G, -1)[..., 0].transpose(1, 2).reshape(P * G, T)
        states = recurrent_state.reshape(P * G, -1)[:, :size].view(P * G, *self.state_shape).unbind(1)
        kappa = head_decays(self.retention_decay, self.state_shape[1], recurrent_state)
        team_acts = self._by_team(acts).reshape(P * G, T, -1)
        return [StepMemory(layer, kappa, team_acts, first) for layer in states]

    def _recurrent_state(self, memories: Sequence[StepMemory], like: Tensor) -> Tensor:
        """Returns the recurrent state [P, R, W] after the last step, for the rows of `like` [P, R, ...]."""
        flat = torch.stack([memory.state for memory in memories], 1).flatten(1)
        padded = nn.functional.pad(flat, (0, self.team_size * self.recurrent_units - flat.shape[1]))
        return padded.reshape(*like.shape[:2], self.recurrent_units)

    def _by_team(self, x: Tensor) -> Tensor:
        """Returns the rows of T steps of games as G = T*games teams: [P, T, R, ...] -> [P, G, S,
        ...]. With memory the steps of a game follow each other, otherwise the games of a step."""
        teams = x.reshape(*x.shape[:2], -1, self.team_size, *x.shape[3:])
        if self.recurrent_units:
            teams = teams.transpose(1, 2)
        return teams.flatten(1, 2)

    def _by_step(self, x: Tensor, steps: int) -> Tensor:
        """Returns rows of teams as those of steps, the reverse of `_by_team`: [P, G, S, ...] -> [P, T, R, ...]."""
        if self.recurrent_units:
            return x.unflatten(1, (-1, steps)).transpose(1, 2).flatten(2, 3)
        return x.reshape(len(x), steps, -1, *x.shape[3:])

    # ---- encoder

    def encode(self, obs: Tensor, acts: Tensor, memories: Sequence[StepMemory] = ()) -> Tensor:
        """Returns the encodings of the seats [P, G, S, H] from observations [P, G, S, *view]; `acts` [P, G, S] bool are
        the seats that act. Sets the memories of the encoder's layers to the state after the last step."""
        x = rowwise(self.norms[0], self._encode_obs(obs.flatten(1, 2)).view(*obs.shape[:3], -1))
        mask = _mask(acts, causal=False)
        for i, block in enumerate(self.encoder):
            x = block(x, mask, memories[i] if memories else None)
        return x

    def values(self, encoded: Tensor) -> Tensor:
        """Returns the value of each seat [P, G, S] from its encoding."""
        assert self.value_head is not None
        return rowwise(self.value_head, self._dense(self.before_value, encoded))[..., 0]

    # ---- decoder

    def decode(self, encoded: Tensor, actions: Tensor, acts: Tensor, memories: Sequence[StepMemory] = ()) -> Tensor:
        """Returns the outputs [P, G, S, O] of all seats at once, each given the `actions` [P, G, S, ...] of the seats
        before it. Sets the memories of the decoder's layers to the state after the last step."""
        tokens = self._previous(encode_actions(self.action_space, actions), acts)
        return self._decode_tokens(encoded, tokens, _mask(acts, causal=True), memories[len(self.encoder) :])

    def _decode_tokens(self, encoded: Tensor, tokens: Tensor, mask: Tensor | None, past: Sequence[Past]) -> Tensor:
        """Returns outputs [P, G, S, O] for tokens [P, G, S, A+1]; `past` is by layer, or empty."""
        x = rowwise(self.norms[1], self._dense(self.action_embedding, tokens))
        for i, block in enumerate(self.decoder):
            x = block(x, encoded, mask, past[2 * i : 2 * i + 2] or (None, None))
        return rowwise(self.head, self._dense(self.before_head, x))

    def play(
        self,
        obs: Tensor,
        acts: Tensor,
        choose: SeatSelector,
        recurrent_state: Tensor | None = None,
        is_first: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Chooses the actions of the seats one after another; returns them [P, G, S, ...], their
        log-probabilities [P, G, S] (None if `choose` gives none) and the new recurrent state [P, R,
        W] (None without memory). `obs` is [P, G, S, *view], `acts` [P, G, S], `is_first` [P, R]."""
        rows = acts.flatten(1)[:, None]
        if is_first is not None:
            is_first = is_first[:, None]
        memories = self._memories(recurrent_state, is_first, rows)
        encoded = self.encode(obs, acts, memories)
        mask = _mask(acts, causal=True)
        token = self._start(encoded)
        kept = memories[len(self.encoder) :]
        past: list[list[Tensor]] = [[one.before_seats()] for one in kept] or [[] for _ in range(2 * len(self.decoder))]
        actions = []
        logps = []
        for i in range(encoded.shape[2]):
            here = None if mask is None else mask[:, :, i : i + 1, : i + 1]
            out = self._decode_tokens(encoded[:, :, i : i + 1], token, here, past)
            action, logp = choose(out[:, :, 0], i)
            actions.append(action)
            logps.append(logp)
            code = encode_actions(self.action_space, action)[:, :, None]
            token = torch.where(acts[:, :, i, None, None], nn.functional.pad(code, (0, 1)), token)
        if kept:
            for memory, (before, last) in zip(kept, past, strict=True):
                memory.after_seats(before, last)
            recurrent_state = self._recurrent_state(memories, rows[:, 0])
        known_logps = [logp for logp in logps if logp is not None]
        if not known_logps:
            return torch.stack(actions, 2), None, recurrent_state
        return torch.stack(actions, 2), torch.stack(known_logps, 2), recurrent_state

    def _previous(self, codes: Tensor, acts: Tensor) -> Tensor:
        """Returns each seat's input token [P, G, S, A+1]: the encoded action of the last acting
        seat before it and a 0, or the start token if no seat acts before it."""
        numbers = torch.arange(codes.shape[2], device=codes.device)
        last = torch.where(acts, numbers, -1).cummax(2).values.roll(1, 2)  # the last acting seat up to each, shifted
        last[:, :, 0] = -1
        codes_before = nn.functional.pad(codes.gather(2, last.clamp(min=0)[..., None].expand(codes.shape)), (0, 1))
        return torch.where((last < 0)[..., None], self._start(codes), codes_before)

    def _start(self, like: Tensor) -> Tensor:
        """Returns the start token [P, G, 1, A+1], which means that no seat has acted yet."""
        token = like.new_zeros(*like.shape[:2], 1, self.action_embedding.weight.shape[1])
        token[..., -1] = 1
        return token

    def _dense(self, layer: Linear, x: Tensor) -> Tensor:
        """Applies a layer and the activation function at every position."""
        out: Tensor = layer(x.flatten(1, 2), self.activation)
        return out.view(*x.shape[:3], -1)

    # ---- as a network of rows

    def forward(self, obs: Tensor, team: Team | None = None) -> Tensor:
        """Returns the outputs of seats that each play alone: [P, R, *view] -> [P, R, O]. For a team use `play`."""
        return self._alone(obs, [])

    def unroll(
        self,
        obs: Tensor,
        recurrent_state: Tensor | None = None,
        is_first: Tensor | None = None,
        team: Team | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the outputs over time of seats that each play alone [P, T, R, O], and with memory, for a `team_size`
        of 1, the recurrent state after each step [P, T, R, W] (None without)."""
        if not self.recurrent_units:
            return super().unroll(obs, recurrent_state, is_first, team)
        outputs = []
        states = []
        for t in range(obs.shape[1]):
            acts = torch.ones(len(obs), 1, obs.shape[2], dtype=torch.bool, device=obs.device)
            memories = self._memories(recurrent_state, None if is_first is None else is_first[:, t : t + 1], acts)
            outputs.append(self._alone(obs[:, t], memories))
            recurrent_state = self._recurrent_state(memories, obs[:, t])
            states.append(recurrent_state)
        return torch.stack(outputs, 1), torch.stack(states, 1)

    def _alone(self, obs: Tensor, memories: Sequence[StepMemory]) -> Tensor:
        """Returns the outputs of seats that each play alone, at one step: [P, R, *view] -> [P, R, O]."""
        alone = torch.ones(*obs.shape[:2], 1, dtype=torch.bool, device=obs.device)
        encoded = self.encode(obs[:, :, None], alone, memories)
        return self._decode_tokens(encoded, self._start(encoded), None, memories[len(self.encoder) :])[:, :, 0]

    def unroll_with_values(
        self, obs: Tensor, recurrent_state: Tensor | None, is_first: Tensor | None, team: Team | None
    ) -> tuple[Tensor, Tensor | None]:
        """Returns outputs [P, T, R, O] given the actions of `team`, and values [P, T, R]."""
        assert team is not None and team.actions is not None
        acts = self._by_team(team.acts)
        T = obs.shape[1]
        memories = self._memories(recurrent_state, is_first, team.acts)
        encoded = self.encode(self._by_team(obs), acts, memories)
        outputs = self.decode(encoded, self._by_team(team.actions), acts, memories)
        return self._by_step(outputs, T), self._by_step(self.values(encoded), T)

    def unroll_values(
        self, obs: Tensor, team: Team, recurrent_state: Tensor | None = None, is_first: Tensor | None = None
    ) -> Tensor:
        """Returns values [P, T, R] of observations [P, T, R, *view]."""
        memories = self._memories(recurrent_state, is_first, team.acts)
        encoded = self.encode(self._by_team(obs), self._by_team(team.acts), memories)
        return self._by_step(self.values(encoded), obs.shape[1])


def _mask(acts: Tensor, causal: bool) -> Tensor | None:
    """Returns a mask [P, G, S, S] of the seats that each seat may attend to: itself and the seats
    that act, with `causal` only those before it. None allows all."""
    S = acts.shape[2]
    mask = attention_mask(acts)
    if not causal:
        return mask
    if mask is None:
        return torch.ones(S, S, dtype=torch.bool).tril().expand(*acts.shape, S)
    return mask.tril()
