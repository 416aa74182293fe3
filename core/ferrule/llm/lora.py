"""`LoRARequest`: the adapter that an offline request is computed with, as vLLM names it."""

from __future__ import annotations

from msgspec import Struct

from ferrule.errors import RequestError


class LoRARequest(Struct, frozen=True):
    """An adapter: a name and a number of the caller's choice, which no other adapter has, and a folder or a hub id.
    Public: ``from ferrule import LoRARequest``.

    It is loaded when it is first used. With `load_inplace` it takes the place of the adapter of its name at each use.
    Raises RequestError for fields of other types, and for a number below 1.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    base_model_name: str | None = None
    load_inplace: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.lora_name, str) or not isinstance(self.lora_path, str) or not self.lora_path:
            raise RequestError("A LoRARequest needs a lora_name and a lora_path, both texts.", "lora_request")
        if type(self.lora_int_id) is not int or self.lora_int_id < 1:
            raise RequestError("lora_int_id must be an integer of at least 1.", "lora_request")

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def adapter_id(self) -> int:
        return self.lora_int_id

    @property
    def path(self) -> str:
        return self.lora_path
