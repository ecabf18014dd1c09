from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class SetDrainingRequest(_message.Message):
    __slots__ = ("is_draining",)
    IS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    is_draining: bool
    def __init__(self, is_draining: _Optional[bool] = ...) -> None: ...

class SetDrainingResponse(_message.Message):
    __slots__ = ("num_requests",)
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    num_requests: int
    def __init__(self, num_requests: _Optional[int] = ...) -> None: ...

class SetWorkerLogLevelRequest(_message.Message):
    __slots__ = ("logger", "level")
    LOGGER_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    logger: str
    level: str
    def __init__(self, logger: _Optional[str] = ..., level: _Optional[str] = ...) -> None: ...

class SetWorkerLogLevelResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetWorkerConfigRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetWorkerConfigResponse(_message.Message):
    __slots__ = ("values",)
    class ValuesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.ScalarMap[str, str]
    def __init__(self, values: _Optional[_Mapping[str, str]] = ...) -> None: ...

class StartWorkerProfileRequest(_message.Message):
    __slots__ = ("num_steps",)
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    num_steps: int
    def __init__(self, num_steps: _Optional[int] = ...) -> None: ...

class StartWorkerProfileResponse(_message.Message):
    __slots__ = ("path",)
    PATH_FIELD_NUMBER: _ClassVar[int]
    path: str
    def __init__(self, path: _Optional[str] = ...) -> None: ...

class StopWorkerProfileRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StopWorkerProfileResponse(_message.Message):
    __slots__ = ("path",)
    PATH_FIELD_NUMBER: _ClassVar[int]
    path: str
    def __init__(self, path: _Optional[str] = ...) -> None: ...
