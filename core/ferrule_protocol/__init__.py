"""The SDK that protocols are built from: what every router needs that generates.

Conversation, Tools, Documents  fields of a body that holds a conversation, and the messages' own type, ChatMessage
TemplateFields      the fields that shape its text besides its messages
chat_prompt         a conversation and these fields, as `Service.admit` takes them
sampling            a body's sampling parameters, over the model's defaults
Notes               fields of a request that do nothing: in the answer, in a header, in the log, or refused
unread_by_template  which parts of a conversation the server's chat template does not show
Closing             a stream of events that lets go of its source even when it was never begun
Meter               the usage of all choices
shown               the events of an output that a client is shown
check_tool_choice   whether a choice of tools fits the tools and the server
spelling            how a body names the fields that the service refuses under other names
fingerprint         what changes with the model and how it runs
finite              a log-probability that JSON has

Notes and usage are values: each protocol writes them in its own form.
"""

from ferrule.frontend.text.builtin import choose_templates
from ferrule.frontend.text.messages import (
    ChatMessage,
    Conversation,
    Documents,
    TemplateFields,
    Tools,
    chat_prompt,
)
from ferrule_protocol.answers import Closing, Meter, fingerprint, finite, shown
from ferrule_protocol.notes import MAX_NOTES, NOTES_HEADER, Extension, Notes, extended, unread_by_template
from ferrule_protocol.sampling import check_tool_choice, sampling, spelling

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
    "check_tool_choice",
    "choose_templates",
    "extended",
    "fingerprint",
    "finite",
    "sampling",
    "shown",
    "spelling",
    "unread_by_template",
]
