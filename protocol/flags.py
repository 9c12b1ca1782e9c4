"""Switches of requests that clients may also send as null, as OpenAI declares them: null means the default."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    Flag = bool  # what it is once the struct is there
else:
    Flag = bool | None


class WithFlags(msgspec.Struct):
    """A struct whose fields of type `Flag` take null on the wire and then have their default."""

    def __post_init__(self) -> None:
        fields, defaults = self.__struct_fields__, self.__struct_defaults__
        for field, default in zip(reversed(fields), reversed(defaults), strict=False):  # defaults are of the last ones
            if isinstance(default, bool) and getattr(self, field) is None:
                setattr(self, field, default)
