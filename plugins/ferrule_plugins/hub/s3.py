"""`s3`: folders of buckets, of AWS S3 or a store that speaks its protocol: ``s3://BUCKET/FOLDER``.

Names that begin so are asked of this hub, whatever `--hub` says. Variables are those that Run:ai's streamer documents,
and boto3's: https://github.com/run-ai/runai-model-streamer/blob/master/docs/src/env-vars.md

The hub fetches what a folder needs into the cache, into a folder for each listing of ETags that is never changed;
`runai_streamer` reads weights where they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from ferrule.errors import CheckpointError
from ferrule.interfaces.hub import Choose, ModelHub, Repository
from ferrule_files.s3.fetch import fetch
from ferrule_files.s3.store import Store, place, refusal

# Of files in folders within the model's: else a bucket of many models would be downloaded before one is missed.
_DEEP_BYTES = 16 << 20


class S3(ModelHub):
    """An S3 store as a hub. The newest state is fetched: a bucket has no revisions. `token` is for other hubs, and not
    sent.
    """

    def refuses(self, name: str) -> str | None:
        return refusal(name)

    def files(self, repository: Repository) -> Sequence[str] | None:
        return list(self._open(repository).objects())

    def fetch(self, repository: Repository, choose: Choose) -> Path:
        store = self._open(repository)
        objects = store.objects()
        if not objects:
            raise CheckpointError(f"{store.at} has no objects.", "Name the folder of a model: s3://BUCKET/FOLDER.")
        patterns = choose(list(objects))
        ignored = [form for each in repository.ignore for form in (each, each.replace("/**/", "/"))]

        def wanted(name: str, form: str) -> bool:
            deep = "/" in name and "/" not in form and form != "*"
            return fnmatch(name, form) and not (deep and objects[name].size > _DEEP_BYTES)

        names = [
            name
            for name in objects
            if any(wanted(name, form) for form in patterns) and not any(fnmatch(name, form) for form in ignored)
        ]
        return fetch(store, objects, names, repository.folder)

    def _open(self, repository: Repository) -> Store:
        if repository.revision is not None:
            raise CheckpointError(
                f"{repository.name} has no revision {repository.revision!r}: buckets have none.",
                "Leave out --revision and --tokenizer-revision, and name the folder of that state.",
            )
        return Store(place(repository.name))
