from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Value(_message.Message):
    __slots__ = ("none", "truth", "integer", "long", "real", "text", "surrogates", "data", "list", "tuple", "set", "mapping", "array", "scalar", "chat")
    NONE_FIELD_NUMBER: _ClassVar[int]
    TRUTH_FIELD_NUMBER: _ClassVar[int]
    INTEGER_FIELD_NUMBER: _ClassVar[int]
    LONG_FIELD_NUMBER: _ClassVar[int]
    REAL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    SURROGATES_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    LIST_FIELD_NUMBER: _ClassVar[int]
    TUPLE_FIELD_NUMBER: _ClassVar[int]
    SET_FIELD_NUMBER: _ClassVar[int]
    MAPPING_FIELD_NUMBER: _ClassVar[int]
    ARRAY_FIELD_NUMBER: _ClassVar[int]
    SCALAR_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    none: bool
    truth: bool
    integer: int
    long: bytes
    real: float
    text: str
    surrogates: bytes
    data: bytes
    list: Items
    tuple: Items
    set: Items
    mapping: Pairs
    array: Array
    scalar: Array
    chat: Chat
    def __init__(self, none: bool = ..., truth: bool = ..., integer: _Optional[int] = ..., long: _Optional[bytes] = ..., real: _Optional[float] = ..., text: _Optional[str] = ..., surrogates: _Optional[bytes] = ..., data: _Optional[bytes] = ..., list: _Optional[_Union[Items, _Mapping]] = ..., tuple: _Optional[_Union[Items, _Mapping]] = ..., set: _Optional[_Union[Items, _Mapping]] = ..., mapping: _Optional[_Union[Pairs, _Mapping]] = ..., array: _Optional[_Union[Array, _Mapping]] = ..., scalar: _Optional[_Union[Array, _Mapping]] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ...) -> None: ...

class Items(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[Value]
    def __init__(self, items: _Optional[_Iterable[_Union[Value, _Mapping]]] = ...) -> None: ...

class Pairs(_message.Message):
    __slots__ = ("pairs",)
    PAIRS_FIELD_NUMBER: _ClassVar[int]
    pairs: _containers.RepeatedCompositeFieldContainer[Pair]
    def __init__(self, pairs: _Optional[_Iterable[_Union[Pair, _Mapping]]] = ...) -> None: ...

class Pair(_message.Message):
    __slots__ = ("name", "other", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OTHER_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    other: Value
    value: Value
    def __init__(self, name: _Optional[str] = ..., other: _Optional[_Union[Value, _Mapping]] = ..., value: _Optional[_Union[Value, _Mapping]] = ...) -> None: ...

class Array(_message.Message):
    __slots__ = ("dtype", "shape", "data")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    def __init__(self, dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ...) -> None: ...

class Chat(_message.Message):
    __slots__ = ("messages", "tools")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    messages: Items
    tools: Items
    def __init__(self, messages: _Optional[_Union[Items, _Mapping]] = ..., tools: _Optional[_Union[Items, _Mapping]] = ...) -> None: ...

class Step(_message.Message):
    __slots__ = ("observations", "rewards", "team_reward", "legal_actions", "state", "truncated", "info")
    OBSERVATIONS_FIELD_NUMBER: _ClassVar[int]
    REWARDS_FIELD_NUMBER: _ClassVar[int]
    TEAM_REWARD_FIELD_NUMBER: _ClassVar[int]
    LEGAL_ACTIONS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    INFO_FIELD_NUMBER: _ClassVar[int]
    observations: Pairs
    rewards: Pairs
    team_reward: Value
    legal_actions: Value
    state: Value
    truncated: Value
    info: Pairs
    def __init__(self, observations: _Optional[_Union[Pairs, _Mapping]] = ..., rewards: _Optional[_Union[Pairs, _Mapping]] = ..., team_reward: _Optional[_Union[Value, _Mapping]] = ..., legal_actions: _Optional[_Union[Value, _Mapping]] = ..., state: _Optional[_Union[Value, _Mapping]] = ..., truncated: _Optional[_Union[Value, _Mapping]] = ..., info: _Optional[_Union[Pairs, _Mapping]] = ...) -> None: ...

class Kind(_message.Message):
    __slots__ = ("type", "options")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    type: str
    options: Pairs
    def __init__(self, type: _Optional[str] = ..., options: _Optional[_Union[Pairs, _Mapping]] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("kind", "seed", "actions")
    KIND_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    ACTIONS_FIELD_NUMBER: _ClassVar[int]
    kind: Kind
    seed: Value
    actions: _containers.RepeatedCompositeFieldContainer[Pairs]
    def __init__(self, kind: _Optional[_Union[Kind, _Mapping]] = ..., seed: _Optional[_Union[Value, _Mapping]] = ..., actions: _Optional[_Iterable[_Union[Pairs, _Mapping]]] = ...) -> None: ...

class Expert(_message.Message):
    __slots__ = ("seat", "random")
    SEAT_FIELD_NUMBER: _ClassVar[int]
    RANDOM_FIELD_NUMBER: _ClassVar[int]
    seat: str
    random: bytes
    def __init__(self, seat: _Optional[str] = ..., random: _Optional[bytes] = ...) -> None: ...

class Close(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Request(_message.Message):
    __slots__ = ("id", "session", "open", "step", "fork", "close", "expert")
    ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    FORK_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    EXPERT_FIELD_NUMBER: _ClassVar[int]
    id: int
    session: int
    open: Open
    step: Pairs
    fork: int
    close: Close
    expert: Expert
    def __init__(self, id: _Optional[int] = ..., session: _Optional[int] = ..., open: _Optional[_Union[Open, _Mapping]] = ..., step: _Optional[_Union[Pairs, _Mapping]] = ..., fork: _Optional[int] = ..., close: _Optional[_Union[Close, _Mapping]] = ..., expert: _Optional[_Union[Expert, _Mapping]] = ...) -> None: ...

class Requests(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[Request]
    def __init__(self, requests: _Optional[_Iterable[_Union[Request, _Mapping]]] = ...) -> None: ...

class Opened(_message.Message):
    __slots__ = ("steps",)
    STEPS_FIELD_NUMBER: _ClassVar[int]
    steps: _containers.RepeatedCompositeFieldContainer[Step]
    def __init__(self, steps: _Optional[_Iterable[_Union[Step, _Mapping]]] = ...) -> None: ...

class Said(_message.Message):
    __slots__ = ("answer", "random")
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    RANDOM_FIELD_NUMBER: _ClassVar[int]
    answer: Value
    random: bytes
    def __init__(self, answer: _Optional[_Union[Value, _Mapping]] = ..., random: _Optional[bytes] = ...) -> None: ...

class Fault(_message.Message):
    __slots__ = ("why", "error", "message")
    class Why(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        ENV: _ClassVar[Fault.Why]
        REFUSED: _ClassVar[Fault.Why]
        UNKNOWN: _ClassVar[Fault.Why]
        DRAINING: _ClassVar[Fault.Why]
    ENV: Fault.Why
    REFUSED: Fault.Why
    UNKNOWN: Fault.Why
    DRAINING: Fault.Why
    WHY_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    why: Fault.Why
    error: str
    message: str
    def __init__(self, why: _Optional[_Union[Fault.Why, str]] = ..., error: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class Reply(_message.Message):
    __slots__ = ("id", "opened", "step", "said", "done", "fault", "instance")
    ID_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SAID_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    id: int
    opened: Opened
    step: Step
    said: Said
    done: Close
    fault: Fault
    instance: Value
    def __init__(self, id: _Optional[int] = ..., opened: _Optional[_Union[Opened, _Mapping]] = ..., step: _Optional[_Union[Step, _Mapping]] = ..., said: _Optional[_Union[Said, _Mapping]] = ..., done: _Optional[_Union[Close, _Mapping]] = ..., fault: _Optional[_Union[Fault, _Mapping]] = ..., instance: _Optional[_Union[Value, _Mapping]] = ...) -> None: ...

class Replies(_message.Message):
    __slots__ = ("replies", "load", "draining", "hello")
    REPLIES_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    replies: _containers.RepeatedCompositeFieldContainer[Reply]
    load: int
    draining: bool
    hello: Hello
    def __init__(self, replies: _Optional[_Iterable[_Union[Reply, _Mapping]]] = ..., load: _Optional[int] = ..., draining: bool = ..., hello: _Optional[_Union[Hello, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol", "worker", "workers")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    worker: str
    workers: int
    def __init__(self, protocol: _Optional[int] = ..., worker: _Optional[str] = ..., workers: _Optional[int] = ...) -> None: ...

class Option(_message.Message):
    __slots__ = ("name", "shown")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHOWN_FIELD_NUMBER: _ClassVar[int]
    name: str
    shown: str
    def __init__(self, name: _Optional[str] = ..., shown: _Optional[str] = ...) -> None: ...

class Description(_message.Message):
    __slots__ = ("protocol", "types", "seats", "roles", "expert", "options", "fault", "load", "workers")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    TYPES_FIELD_NUMBER: _ClassVar[int]
    SEATS_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    EXPERT_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    types: _containers.RepeatedScalarFieldContainer[str]
    seats: _containers.RepeatedScalarFieldContainer[str]
    roles: Pairs
    expert: bool
    options: _containers.RepeatedCompositeFieldContainer[Option]
    fault: Fault
    load: int
    workers: int
    def __init__(self, protocol: _Optional[int] = ..., types: _Optional[_Iterable[str]] = ..., seats: _Optional[_Iterable[str]] = ..., roles: _Optional[_Union[Pairs, _Mapping]] = ..., expert: bool = ..., options: _Optional[_Iterable[_Union[Option, _Mapping]]] = ..., fault: _Optional[_Union[Fault, _Mapping]] = ..., load: _Optional[int] = ..., workers: _Optional[int] = ...) -> None: ...
