"""The multi-agent transformer (MAT; Wen et al., 2022): an encoder over the observations of a team computes values, and
a decoder chooses the actions of the seats one after another, each given the actions before it.

Seats that do not act (dead units, or seats that wait for their turn) are left out: the others attend neither to them
nor to their actions, as if the team were smaller.

With `attention_type: retention`, retention replaces attention in encoder and decoder, as in Sable (Mahjoub et al.,
2024). It spans the seats of one step only: there is no memory of earlier steps.

Shapes: `P` members (teams of a stack), `T` steps, `R` = G*S rows, `G` games, `S` seats of a team, `H` units, `O`
outputs, `A` numbers of an encoded action.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from palestra.envs.vector.base import Space
from palestra.nets.attention import AttentionType, FeedForward, SelfAttentionBlock, make_attention, rowwise
from palestra.nets.dense import GAIN, Activation, LayerNorm, Linear
from palestra.nets.entities import EntityLayout
from palestra.nets.heads import encode_actions, encoding_size, make_head
from palestra.nets.layers import Net, NetConfig, Team
from palestra.nets.on_device import all_known, identity

# outputs [P, G, O] and the number of a seat within the team -> its actions [P, G, ...] and log-probabilities [P, G]
SeatSelector = Callable[[Tensor, int], tuple[Tensor, Tensor | None]]


class DecoderBlock(nn.Module):
    """A block of the decoder: self-attention over the actions before a seat, then attention of the seat's encoding to
    its result, then a feed-forward layer, each added to its input and normalised (Wen et al., 2022, section 3.2)."""

    def __init__(
        self,
        units: int,
        heads: int,
        activation: Activation,
        generators: Sequence[torch.Generator],
        kind: AttentionType = "softmax",
    ) -> None:
        super().__init__()
        self.to_actions = make_attention(kind, units, heads, generators)
        self.to_encoding = make_attention(kind, units, heads, generators)
        self.feed_forward = FeedForward(units, activation, generators)
        self.norms = nn.ModuleList(LayerNorm(units, len(generators)) for _ in range(3))

    def forward(
        self, x: Tensor, encoded: Tensor, mask: Tensor | None, past: tuple[list[Tensor], list[Tensor]] | None = None
    ) -> Tensor:
        """Returns the next features [P, G, S, H] from features of the actions `x` and encodings of the seats `encoded`,
        both [P, G, S, H]. `past` is what both attention layers store of earlier seats, in sequential decoding."""
        first, second = (None, None) if past is None else past
        x = rowwise(self.norms[0], x + self.to_actions(x, x, mask, first))
        x = rowwise(self.norms[1], encoded + self.to_encoding(encoded, x, mask, second))
        return rowwise(self.norms[2], x + self.feed_forward(x))


class MultiAgentTransformer(Net):
    """P transformers of teams of `team_size` seats: from observations to values, and to each seat's outputs given the
    actions of the seats before it. The hidden layers of `config` embed observations; the last one sets the units of the
    transformer. Raises ValueError if `config` sets a GRU or rounds of communication."""

    def __init__(
        self,
        observation_shape: tuple[int, ...],
        space: Space,
        config: NetConfig,
        generators: Sequence[torch.Generator],
        gain: float = 1.0,
        team_size: int = 1,
        entities: EntityLayout | None = None,
    ) -> None:
        if config.gru_units or config.communication_rounds:
            raise ValueError(
                "gru_units, communication_rounds: the transformer of algorithm mat is not recurrent, and its seats "
                "exchange information by attention: leave these settings out"
            )
        super().__init__(
            observation_shape, make_head(space).outputs, config, generators, gain, True, team_size, entities
        )
        units, heads, activation = config.hidden[-1], config.attention_heads, config.activation
        blocks, kind = range(config.attention_blocks), config.attention_type
        self.action_space, self.activation = space, activation
        self.encoder = nn.ModuleList(SelfAttentionBlock(units, heads, activation, generators, kind) for _ in blocks)
        self.decoder = nn.ModuleList(DecoderBlock(units, heads, activation, generators, kind) for _ in blocks)
        self.action_embedding = Linear(encoding_size(space) + 1, units, GAIN[activation], generators)
        self.before_head = Linear(units, units, GAIN[activation], generators)
        self.before_value = Linear(units, units, GAIN[activation], generators)
        self.norms = nn.ModuleList(LayerNorm(units, len(generators)) for _ in range(2))  # of observations and actions

    @property
    def plays_team(self) -> bool:
        return True

    # ---- encoder

    def encode(self, obs: Tensor, acts: Tensor) -> Tensor:
        """Returns the encodings of the seats [P, G, S, H] from observations [P, G, S, *view]; `acts` [P, G, S] bool are
        the seats that act."""
        x = rowwise(self.norms[0], self._seen(obs.flatten(1, 2)).view(*obs.shape[:3], -1))
        for block in self.encoder:
            x = block(x, _mask(acts, causal=False))
        return x

    def values(self, encoded: Tensor) -> Tensor:
        """Returns the value of each seat [P, G, S] from its encoding."""
        assert self.value_head is not None
        return rowwise(self.value_head, self._dense(self.before_value, encoded))[..., 0]

    # ---- decoder

    def decode(self, encoded: Tensor, actions: Tensor, acts: Tensor) -> Tensor:
        """Returns the outputs [P, G, S, O] of all seats at once, each given the `actions` [P, G, S, ...] of the seats
        before it."""
        tokens = self._previous(encode_actions(self.action_space, actions), acts)
        x, mask = self._embed(tokens), _mask(acts, causal=True)
        for block in self.decoder:
            x = block(x, encoded, mask)
        return rowwise(self.head, self._dense(self.before_head, x))

    def play(self, obs: Tensor, acts: Tensor, choose: SeatSelector) -> tuple[Tensor, Tensor | None]:
        """Chooses the actions of the seats one after another; returns them [P, G, S, ...] and their log-probabilities
        [P, G, S] (None if `choose` gives none). `obs` is [P, G, S, *view], `acts` [P, G, S]."""
        encoded, mask = self.encode(obs, acts), _mask(acts, causal=True)
        token = self._start(encoded)
        past: list[tuple[list[Tensor], list[Tensor]]] = [([], []) for _ in self.decoder]
        actions, logps = [], []
        for i in range(encoded.shape[2]):
            x, here = self._embed(token), None if mask is None else mask[:, :, i : i + 1, : i + 1]
            for block, kept in zip(self.decoder, past, strict=True):
                x = block(x, encoded[:, :, i : i + 1], here, kept)
            action, logp = choose(rowwise(self.head, self._dense(self.before_head, x))[:, :, 0], i)
            actions.append(action)
            logps.append(logp)
            code = encode_actions(self.action_space, action)[:, :, None]
            token = torch.where(acts[:, :, i, None, None], nn.functional.pad(code, (0, 1)), token)
        return torch.stack(actions, 2), None if logps[0] is None else torch.stack(
            [logp for logp in logps if logp is not None], 2
        )

    def _previous(self, codes: Tensor, acts: Tensor) -> Tensor:
        """Returns each seat's input token [P, G, S, A+1]: the encoded action of the last acting seat before it and a 0,
        or the start token if no seat acts before it."""
        numbers = torch.arange(codes.shape[2], device=codes.device)
        last = torch.where(acts, numbers, -1).cummax(2).values.roll(1, 2)  # the last acting seat up to each, shifted
        last[:, :, 0] = -1
        taken = nn.functional.pad(codes.gather(2, last.clamp(min=0)[..., None].expand(codes.shape)), (0, 1))
        return torch.where((last < 0)[..., None], self._start(codes), taken)

    def _start(self, like: Tensor) -> Tensor:
        """Returns the start token [P, G, 1, A+1], which means that no seat has acted yet."""
        token = like.new_zeros(*like.shape[:2], 1, self.action_embedding.weight.shape[1])
        token[..., -1] = 1
        return token

    def _embed(self, tokens: Tensor) -> Tensor:
        return rowwise(self.norms[1], self._dense(self.action_embedding, tokens))

    def _dense(self, layer: Linear, x: Tensor) -> Tensor:
        """Applies a layer and the activation function at every position."""
        out: Tensor = layer(x.flatten(1, 2), self.activation)
        return out.view(*x.shape[:3], -1)

    # ---- as a network of rows

    def forward(self, obs: Tensor, team: Team | None = None) -> Tensor:
        """Returns the outputs of seats that each play alone: [P, R, *view] -> [P, R, O]. For a team use `play`."""
        alone = torch.ones(*obs.shape[:2], 1, dtype=torch.bool, device=obs.device)
        encoded = self.encode(obs[:, :, None], alone)
        x = self._embed(self._start(encoded))
        for block in self.decoder:
            x = block(x, encoded, None)
        return rowwise(self.head, self._dense(self.before_head, x))[:, :, 0]

    def unroll_with_values(
        self,
        obs: Tensor,
        recurrent_state: Tensor | None = None,
        is_first: Tensor | None = None,
        team: Team | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns outputs [P, T, R, O] given the actions of `team`, and values [P, T, R]."""
        assert team is not None and team.actions is not None
        encoded, acts = self._encoded(obs, team)
        P, T, R = obs.shape[:3]
        actions = team.actions.reshape(*acts.shape, *team.actions.shape[3:])
        return self.decode(encoded, actions, acts).view(P, T, R, -1), self.values(encoded).view(P, T, R)

    def unroll_values(self, obs: Tensor, team: Team) -> Tensor:
        """Returns values [P, T, R] of observations [P, T, R, *view]."""
        return self.values(self._encoded(obs, team)[0]).view(obs.shape[:3])

    def _encoded(self, obs: Tensor, team: Team) -> tuple[Tensor, Tensor]:
        """Returns encodings [P, T*G, S, H] and the seats that act [P, T*G, S], for all steps."""
        shape = (len(obs), -1, self.team_size)
        acts = team.acts.reshape(shape)
        return self.encode(obs.reshape(*shape, *obs.shape[3:]), acts), acts


def _mask(acts: Tensor, causal: bool) -> Tensor | None:
    """Returns a mask [P, G, S, S] of the seats that each seat may attend to: itself and the seats that act, with
    `causal` only those before it. None allows all."""
    S = acts.shape[2]
    if all_known(acts):
        return torch.ones(S, S, dtype=torch.bool).tril().expand(*acts.shape, S) if causal else None
    allowed = acts[:, :, None] | identity(S, acts.device).bool()
    return allowed.tril() if causal else allowed
