"""The SDK that protocols are built from: what every router needs that generates.

Conversation, Tools, Documents  fields of a body that holds a conversation, and the messages' own type, ChatMessage
TemplateFields      the fields that shape its text besides its messages
chat_prompt         a conversation and these fields, as `Service.generate` takes them
sampling            a body's sampling parameters, over the model's defaults
Notes               fields of a request that do nothing: in the answer, in a header, in the log, or refused
unread_by_template  which parts of a conversation the server's chat template does not show
Closing             a stream of events that lets go of its source even when it was never begun
Meter               the usage of all choices
name_in_answers     what an answer calls the model; fingerprint: what changes with the model and how it runs
constraint_named    names the field that stated a constraint where one is refused
finite              a log-probability that JSON has

Notes and usage are values: each protocol writes them in its own form.
"""

from ferrule.frontend.text.messages import (
    ChatMessage,
    Conversation,
    Documents,
    TemplateFields,
    Tools,
    chat_prompt,
)
from ferrule.frontend.text.render import choose_templates
from ferrule_protocol.answers import constraint_named, fingerprint, finite, name_in_answers
from ferrule_protocol.closing import Closing
from ferrule_protocol.notes import MAX_NOTES, NOTES_HEADER, Extension, Notes, extended, unread_by_template
from ferrule_protocol.sampling import Meter, sampling

__all__ = [
    "MAX_NOTES",
    "NOTES_HEADER",
    "ChatMessage",
    "Closing",
    "Conversation",
    "Documents",
    "Extension",
    "Meter",
    "Notes",
    "TemplateFields",
    "Tools",
    "chat_prompt",
    "choose_templates",
    "constraint_named",
    "extended",
    "fingerprint",
    "finite",
    "name_in_answers",
    "sampling",
    "unread_by_template",
]
