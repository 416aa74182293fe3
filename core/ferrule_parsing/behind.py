"""What a form leaves when its texts have begun."""

from __future__ import annotations

from msgspec.structs import replace

from ferrule.forms import Anything, Fixed, Form, OneOf, Repeated, Series, Tag, Triggered


def behind(form: Form, text: str) -> Form | None:
    """Return the form of the text that follows `text`, among the form's texts that begin with it. None where none is
    known to begin with it.
    """
    match form:
        case Fixed(whole):
            return Fixed(whole.removeprefix(text)) if whole.startswith(text) else None
        case Series((Fixed(first), *others)) if text.startswith(first):
            rest = text.removeprefix(first)
            return behind(Series(tuple(others)), rest) if rest else Series(tuple(others))
        case Series((first, *others)):
            found = behind(first, text)
            return None if found is None else Series((found, *others))
        case OneOf(options):
            return _one_of([behind(option, text) for option in options])
        case Repeated(part, separator, least, most) if most != 0:
            again = Series((Fixed(separator), part))
            return _followed(behind(part, text), Repeated(again, "", max(0, least - 1), most and most - 1))
        case Triggered(triggers, tags, most) if any(trigger in text for trigger in triggers):
            begun = [_behind_tag(tag, text) for tag in tags]
            more = form if most is None else replace(form, most=most - 1) if most > 1 else Fixed("")
            return _followed(_one_of(begun), more)
        case Triggered() | Anything():
            return form
    return None


def _behind_tag(tag: Tag, text: str) -> Form | None:
    return behind(Series((Fixed(tag.begin), tag.content, Fixed(tag.end))), text)


def _one_of(forms: list[Form | None]) -> Form | None:
    found = [form for form in forms if form is not None]
    return None if not found else found[0] if len(found) == 1 else OneOf(tuple(found))


def _followed(form: Form | None, more: Form) -> Form | None:
    return None if form is None else Series((form, more))
