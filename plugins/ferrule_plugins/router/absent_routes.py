"""Paths that clients of other servers know and this server does not have, each with an explanation and an
alternative.
"""

from __future__ import annotations

from collections.abc import Mapping

from fastapi.routing import APIRoute

from ferrule.interfaces.router import RouterContext, access_of

# path → the task that a model must be for
_TASKS: Mapping[str, str] = {
    "/classify": "classify",
    "/score": "score",
    "/v1/score": "score",
    "/rerank": "score",
    "/v1/rerank": "score",
    "/v2/rerank": "score",
    "/v1/audio/transcriptions": "transcription",
    "/v1/audio/translations": "transcription",
}

_TGI = "TGI's routes: pip install 'ferrule[tgi]', and --routers +tgi."
_EMBED = "POST /api/embed gives the vectors of texts; it needs task embed."
_CHAT = "POST /v1/chat/completions answers conversations."

# Features, by their path; a last "/" stands for all below.
_FEATURES: Mapping[str, str] = {
    "/v1": "This is the base URL for clients; GET /v1/models lists the models.",
    "/v1/embeddings": _EMBED,
    "/v2/embed": _EMBED,
    "/pooling": _EMBED,
    "/v1/responses/compact": "Conversations are not compacted here; truncation auto drops what is oldest.",
    "/v1/uploads/": "Uploads in parts are not in this build; POST /v1/files takes a whole file.",
    "/v1/assistants/": f"Assistants are not in this build. {_CHAT}",
    "/v1/threads/": f"Assistants and their threads are not in this build. {_CHAT}",
    "/v1/conversations/": f"Stored conversations are not in this build. {_CHAT}",
    "/v1/images/": "Image generation is not in this build.",
    "/v1/videos/": "Video generation is not in this build.",
    "/v1/audio/speech": "Speech synthesis is not in this build.",
    "/v1/realtime/": "The realtime API is not in this build.",
    "/v1/moderations": "Moderation is not in this build.",
    "/v1/fine_tuning/": "Fine-tuning is not in this build.",
    "/v1/vector_stores/": "Vector stores are not in this build.",
    "/v1/evals/": "Evaluations are not in this build.",
    "/v1/edits": f"OpenAI has removed edits. {_CHAT}",
    "/v1/engines/": "OpenAI has removed engines; GET /v1/models lists the models.",
    "/generate": f"POST /v1/completions continues a prompt. {_TGI}",
    "/generate_stream": f"POST /v1/completions with stream continues a prompt. {_TGI}",
    "/tokenizer_info": "It needs a server with --enable-tokenizer-info-endpoint.",
    "/inference/": "Disaggregated front ends are not in this build.",
}


def absent_routes(ctx: RouterContext) -> dict[str, str]:
    """Return the paths that this server does not serve, each with a sentence that says why."""
    tasks = {path: f"{path} needs task {needed}, which is not in this build." for path, needed in _TASKS.items()}
    return {**_FEATURES, **tasks, **_left_out(ctx)}


def _left_out(ctx: RouterContext) -> dict[str, str]:
    """Return the routes of built-in routers that `--routers` does not name."""
    found: dict[str, str] = {}
    for name in ctx.plugins.defaults("router"):
        if ("router", name) not in ctx.config.chosen:
            for route in ctx.plugins.make("router", name).router(ctx).routes:
                if isinstance(route, APIRoute) and not access_of(route).administers:
                    found[route.path] = f"The router {name} serves it, and --routers does not name that."
    return found
