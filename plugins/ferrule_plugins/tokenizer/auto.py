"""`auto`: the tokenizers library on a folder's ``tokenizer.json``; readers of other files where that is missing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ferrule.errors import CheckpointError, RequestError
from ferrule.frontend.text.detokenize import decode
from ferrule.interfaces.tokenizer import Tokenizer, TokenizerSource
from ferrule_plugins.freed_memory import give_back
from ferrule_plugins.tokenizer import kimi, mistral, sentencepiece
from ferrule_plugins.tokenizer.files import (
    added_tokens,
    chat_templates,
    extra_special_tokens,
    panics_as_errors,
    read_settings,
    special_tokens,
    token_content,
)
from ferrule_plugins.tokenizer.growth import Growth, read_growth
from ferrule_plugins.tokenizer.token_bytes import TokenBytes, make_token_bytes

_MAX_BYTES = 256 << 20
_MAX_ADDED = 1024  # special tokens around a text


class _Model(msgspec.Struct):
    """The fields of a BPE model. `merges` are pairs of tokens, or texts of two."""

    continuing_subword_prefix: str | None = None
    end_of_word_suffix: str | None = None
    merges: msgspec.Raw = msgspec.Raw(b"[]")


class _File(msgspec.Struct):
    """The fields of a ``tokenizer.json`` that are read beside the library; the vocabulary is passed over, not
    decoded.
    """

    decoder: Any = None
    normalizer: Any = None
    pre_tokenizer: Any = None
    post_processor: Any = None
    model: _Model | None = None


class FastTokenizer(Tokenizer):
    """A tokenizer of the library tokenizers. `core` is a `tokenizers.Tokenizer`; it releases the interpreter lock while
    it encodes a batch.
    """

    def __init__(
        self,
        core: Any,
        decoder: Mapping[str, Any] | None,
        specials: dict[str, str],
        extra: Sequence[str] = (),
        chat_template: str | dict[str, str] | None = None,
        growth: Growth = Growth(),  # noqa: B008 -- frozen
    ) -> None:
        self._core = core
        self._growth, self._free = growth, growth.free
        self._piece: TokenBytes | None = make_token_bytes(decoder)
        self._byte_level = decoder is not None and decoder.get("type") == "ByteLevel"
        added = core.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        self._known: dict[tuple[int, bool], bytes] = {}  # at most two per vocabulary entry
        self.vocab_size = max(core.get_vocab_size(with_added_tokens=True), 1 + max(added, default=-1))
        self.special_tokens = specials
        self.bos_token_id = self._role("bos_token")
        self.eos_token_id = self._role("eos_token")
        named = {core.token_to_id(token) for token in [*specials.values(), *extra]} - {None}
        self.all_special_ids = frozenset(named | {token_id for token_id, token in added.items() if token.special})
        self.chat_template = chat_template

    def _role(self, role: str) -> int | None:
        token = self.special_tokens.get(role)
        found = None if token is None else self._core.token_to_id(token)
        return None if found is None else int(found)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        # A batch of one: only the batch call releases the interpreter lock.
        with panics_as_errors():
            if len(text) > self._free:
                self._growth.check(text, self._core.normalizer.normalize_str)
            try:
                found = self._core.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            except Exception as error:  # the library raises plain Exception for a text that it has no tokens for
                raise RequestError(f"The model's tokenizer cannot encode this text: {error!s:.200}.") from None
        ids: list[int] = found[0].ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        if self._piece is not None:
            return decode(self, ids, skip_special_tokens=skip_special_tokens)
        skipped = self.all_special_ids if skip_special_tokens else frozenset[int]()
        shown = [token for token in ids if 0 <= token < self.vocab_size and token not in skipped]
        text: str = self._core.decode(shown, skip_special_tokens=False)
        return text

    def token(self, token_id: int) -> str | None:
        found: str | None = self._core.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
        return found

    def piece(self, token_id: int, first: bool) -> bytes | None:
        key = (token_id, first)
        known = self._known.get(key)
        if known is not None:
            return known
        if self._piece is None:
            return None
        token = self.token(token_id)
        if token is None:
            return b""
        verbatim = self._byte_level and token_id in self._added  # is not written in the alphabet of bytes
        made = self._known[key] = token.encode() if verbatim else self._piece(token, first)
        return made


class AutoTokenizers(TokenizerSource):
    """The usual tokenizers, by the files of a folder. Options: `trust_remote_code`, for the fallback."""

    def open(self, folder: Path, options: dict[str, Any]) -> Tokenizer:
        with panics_as_errors():
            return self._open(folder, options)

    def _open(self, folder: Path, options: dict[str, Any]) -> Tokenizer:
        file, settings = folder / "tokenizer.json", read_settings(folder)
        if file.is_file():
            core, decoder, growth = _load(file)
        elif _is_plain(folder, settings, options):
            file = folder / sentencepiece.FILE
            core, decoder, growth, settings = _made(file, settings)
        else:
            return _open_other(folder, options)
        specials = special_tokens(settings)
        extra = extra_special_tokens(settings)
        try:
            _add_tokens(core, settings, [*specials.values(), *extra], file)
            _set_ends(core, settings, specials)
        except (TypeError, ValueError) as error:  # the library's, for a token that it cannot add
            stated = folder / "tokenizer_config.json"
            raise CheckpointError(f"{stated} has special tokens of another kind: {error!s:.200}.") from None
        tokenizer = FastTokenizer(core, decoder, specials, extra, chat_templates(folder, settings), growth)
        tokenizer.settings = settings
        return tokenizer


def _is_plain(folder: Path, settings: Mapping[str, Any], options: Mapping[str, Any]) -> bool:
    """Return whether the SentencePiece model of a folder is all that there is of its tokenizer."""
    if not (folder / sentencepiece.FILE).is_file() or mistral.find_file(folder) is not None:
        return False
    stated = settings.get("tokenizer_class")
    remote = options.get("trust_remote_code") is True and "auto_map" in settings
    return (stated is None or stated in sentencepiece.CLASSES) and not remote


def _made(file: Path, stated: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any] | None, Growth, dict[str, Any]]:
    """Return what `_load` returns, for a SentencePiece model, and the settings, of which the stated ones win."""
    import tokenizers

    whole, settings = sentencepiece.read_file(file)
    try:
        growth = read_growth(whole)
        core = tokenizers.Tokenizer.from_str(json.dumps(whole))
    except Exception as error:  # the library raises plain Exception for a model that it cannot use
        raise CheckpointError(f"{file} is not a tokenizer that can be used: {error}.") from None
    return core, whole.get("decoder"), growth, {**settings, **stated}


def _open_other(folder: Path, options: dict[str, Any]) -> Tokenizer:
    from ferrule_plugins.tokenizer.slow import SlowTokenizers

    if mistral.find_file(folder) is not None:
        return mistral.MistralTokenizers().open(folder, options)
    if (folder / kimi.FILE).is_file() and options.get("trust_remote_code") is not True:
        return kimi.open_folder(folder)
    return SlowTokenizers().open(folder, options)


def _load(file: Path) -> tuple[Any, Mapping[str, Any] | None, Growth]:
    import tokenizers

    try:
        if file.stat().st_size > _MAX_BYTES:
            raise CheckpointError(f"{file} is larger than {_MAX_BYTES} bytes.")
        content = file.read_bytes()
        stated = msgspec.json.decode(content, type=_File)
        _check_merges(stated.model)
        growth = _read_growth(stated)
        core = tokenizers.Tokenizer.from_buffer(content)
        core.no_truncation()
        core.no_padding()
        if (added := core.num_special_tokens_to_add(False)) > _MAX_ADDED:
            raise CheckpointError(f"{file} adds {added} special tokens to a text; the most is {_MAX_ADDED}.")
        decoder = stated.decoder
        del content, stated
        give_back()  # what parsing took: 50 MB for a vocabulary of 150,000
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}.") from None
    except CheckpointError:
        raise
    except Exception as error:  # the library raises plain Exception for a file that it cannot use
        raise CheckpointError(f"{file} is not a tokenizer that can be used: {error}.") from None
    return core, decoder if isinstance(decoder, Mapping) else None, growth


def _read_growth(stated: _File) -> Growth:
    affixes = (stated.model.continuing_subword_prefix, stated.model.end_of_word_suffix) if stated.model else ()
    return read_growth({key: value for key, value in msgspec.structs.asdict(stated).items() if key != "model"}, affixes)


def _check_merges(model: _Model | None) -> None:
    """Raise ValueError where the second token of a merge does not begin as `continuing_subword_prefix` says.

    The library cuts as many bytes off whatever they are, and ends the process where it cuts through a character.
    """
    prefix = model.continuing_subword_prefix if model is not None else None
    if model is None or not prefix:
        return
    for merge in msgspec.json.decode(model.merges, type=list[str | tuple[str, str]]):
        second = merge[1] if isinstance(merge, tuple) else merge.partition(" ")[2]
        if not second.startswith(prefix):
            raise ValueError(f"a merge with {second!r:.80}, which does not begin with {prefix!r:.80}")


def _add_tokens(core: Any, settings: Mapping[str, Any], specials: Sequence[str], file: Path) -> None:
    """Add tokens that only ``tokenizer_config.json`` knows; each must get the id that is stated there."""
    from tokenizers import AddedToken

    for token_id, value in added_tokens(settings).items():
        content = token_content(value)
        if content is None or core.token_to_id(content) == token_id:
            continue
        flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
        core.add_tokens([AddedToken(content, **{flag: bool(value.get(flag)) for flag in flags})])
        if core.token_to_id(content) != token_id:
            raise CheckpointError(
                f"{file.parent / 'tokenizer_config.json'}: token {content!r} has id {token_id} there, "
                f"but {core.token_to_id(content)} in {file.name}."
            )
    core.add_special_tokens(list(dict.fromkeys(specials)))  # new ones get the ids behind all others, as in transformers


def _set_ends(core: Any, settings: Mapping[str, Any], specials: Mapping[str, str]) -> None:
    """Follow `add_bos_token` and `add_eos_token` where ``tokenizer.json`` itself adds nothing to a text.

    Where it does, it decides: files written by current tools keep both in step, and transformers reads only that one.
    """
    stated = settings.get("add_bos_token") or settings.get("add_eos_token")
    if not stated or core.num_special_tokens_to_add(False):
        return
    from tokenizers import processors

    names, form = [], ["$A:0"]
    if settings.get("add_bos_token") and (bos := specials.get("bos_token")):
        names.append(bos)
        form = [f"{bos}:0", *form]
    if settings.get("add_eos_token") and (eos := specials.get("eos_token")):
        names.append(eos)
        form = [*form, f"{eos}:0"]
    ids = {name: core.token_to_id(name) for name in names}
    core.post_processor = processors.TemplateProcessing(
        single=form, pair=[*form, "$B:1"], special_tokens=list(ids.items())
    )
