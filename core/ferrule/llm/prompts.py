"""What `LLM` takes as a prompt: a text, ids, or a mapping whose keys are checked like those of a body."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from msgspec.structs import replace
from pydantic import ConfigDict, Field, TypeAdapter

from ferrule.config import PromptAdapter
from ferrule.errors import RequestError
from ferrule.frontend.text.messages import TemplateFields, chat_prompt
from ferrule.interfaces.service import ChatPrompt, Prompt
from ferrule.schema import Arguments, Body, CacheSalt, Text, TokenIds, check_marks, checked, not_here

Conversation = Sequence[Mapping[str, Any]]
TextOrIds = str | Mapping[str, Any] | Sequence[int]  # a text, ids, or a mapping with the keys of `PromptFields`

_MEDIA = not_here("input other than text")
_FORMS = "{'prompt': text}, {'prompt_token_ids': ids} or {'prompt_embeds': tensor}"


class PromptFields(Body):
    """Keys of a prompt that is a mapping. One of the first three is given; with ids, a text is only shown."""

    model_config = ConfigDict(extra="forbid")

    prompt: Annotated[Text | None, Field(description="A text; with ids, the one that they stand for.")] = None
    prompt_token_ids: Annotated[TokenIds | None, Field(description="Token ids.")] = None
    prompt_embeds: Annotated[Any, Field(description="A tensor or array of floats [tokens, hidden].")] = None
    cache_salt: Annotated[
        CacheSalt | None, Field(description="Share cached prefixes only with prompts of the same salt.")
    ] = None
    multi_modal_data: Annotated[Any, _MEDIA] = None
    multi_modal_uuids: Annotated[Any, _MEDIA] = None
    mm_processor_kwargs: Annotated[Any, _MEDIA] = None
    token_type_ids: Annotated[Any, not_here("types of tokens")] = None
    encoder_prompt: Annotated[Any, not_here("models with an encoder")] = None
    decoder_prompt: Annotated[Any, not_here("models with an encoder")] = None


class ChatFields(TemplateFields, Arguments):
    """The arguments of `LLM.chat` besides messages and sampling parameters."""

    chat_template_content_format: Annotated[
        Literal["auto", "string", "openai"], Field(description="As what the template sees content.")
    ] = "auto"


class Given(NamedTuple):
    """A prompt as the gate takes it. `text` is what the ids stand for, where the caller says so."""

    prompt: Prompt | ChatPrompt
    cache_salt: str | None = None
    text: str | None = None
    prompt_adapter: PromptAdapter | None = None


_FIELDS: TypeAdapter[PromptFields] = TypeAdapter(PromptFields)


def read_prompts(prompts: Any) -> list[Given]:
    """Read one prompt or a list of them: one is a text, a mapping, or a list whose first element is an id.

    Raises RequestError that names the prompt and its key.
    """
    one = isinstance(prompts, str | Mapping) or (bool(prompts) and isinstance(prompts[0], int))
    return [read_prompt(prompt, f"prompts[{number}]") for number, prompt in enumerate([prompts] if one else prompts)]


def read_prompt(prompt: Any, where: str) -> Given:
    """Read one prompt, which errors call `where`. Raises RequestError."""
    if isinstance(prompt, str):
        return Given(Prompt(text=prompt))
    if not isinstance(prompt, Mapping):
        try:
            return Given(Prompt(ids=tuple(prompt)))
        except TypeError:
            raise RequestError(f"{where} must be a text, ids, {_FORMS}.", where) from None
    fields: PromptFields = checked(_FIELDS, dict(prompt), where, PromptFields)
    check_marks(fields)
    if fields.prompt_embeds is not None:
        return Given(Prompt(embeds=_embeds(fields.prompt_embeds)), fields.cache_salt)
    if fields.prompt_token_ids is not None:
        return Given(Prompt(ids=tuple(fields.prompt_token_ids)), fields.cache_salt, fields.prompt)
    if fields.prompt is not None:
        return Given(Prompt(text=fields.prompt), fields.cache_salt)
    raise RequestError(f"{where} must be a text, ids, {_FORMS}.", where)


def read_conversations(messages: Conversation | Sequence[Conversation], fields: ChatFields) -> list[Given]:
    """Read one conversation or a list of them. The gate checks the messages."""
    many: Any = [messages] if messages and isinstance(messages[0], Mapping) else messages
    chats = [chat_prompt([_plain(message) for message in conversation], fields) for conversation in many]
    return [Given(replace(chat, content_format=fields.chat_template_content_format)) for chat in chats]


def _plain(message: Any) -> Any:
    return dict(message) if isinstance(message, Mapping) else message


def _embeds(tensor: Any) -> str:
    """Encode a tensor of torch or an array of numpy as clients send embeddings. Raises RequestError."""
    import numpy as np
    from safetensors.numpy import save

    if hasattr(tensor, "detach"):
        tensor = tensor.detach().cpu()
        tensor = tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor  # numpy has no such type
    try:
        array = np.asarray(tensor)
        array = np.ascontiguousarray(array, array.dtype if array.dtype == np.float16 else np.float32)
    except (TypeError, ValueError):
        raise RequestError("prompt_embeds must be a tensor of floats [tokens, hidden].", "prompt_embeds") from None
    return b64encode(save({"prompt_embeds": array})).decode()
