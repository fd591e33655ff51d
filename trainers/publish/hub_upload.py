"""A folder to the Hub in one commit: private first, fetched back and tried, and only then made public.

huggingface_hub transfers the files and asks again where a request fails. Nothing that a server says reaches a message
before it is redacted, and no exception of the client is chained: their requests carry the token.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...core.errors import UserError, causes
from ...core.results import CARD, SUMS, check_sums, sha256_of
from ...core.secrets import HIDDEN, shortened
from ...models.drafters.manifest import MANIFEST
from ..run.stopping import Stop, Stopped

# What the Hub and its users put beside a publication; nothing of it is loaded, and it stays.
_OWN_FILES = {".gitattributes", "LICENSE", "LICENSE.md", "LICENSE.txt", "NOTICE"}
# vLLM and others look for these in the whole path in lower case, in this order, and take the draft for that method.
# Published heads are named `EAGLE-<target>`, `EAGLE3-<target>` or `<target>-Eagle3`.
MATCHED = ("eagle-", "eagle3", "dflash", "dspark")
# Of heads of language models: what their paths must be taken for. All others must be taken for nothing.
_METHODS = {"eagle": "eagle-", "eagle3": "eagle3"}


@dataclass(frozen=True)
class Destination:
    """Where to publish.

    Args:
        revision: a branch, which is made where it is missing; None: main.
        pull_request: propose the commit, in place of making it.
        public: make the repository public once its content has been fetched back and tried.
    """

    repo: str
    revision: str | None = None
    pull_request: bool = False
    public: bool = False


@dataclass(frozen=True)
class Uploaded:
    """Args:
    commit: its hash; of a pull request the one that it proposes.
    private: how the repository was left.
    """

    repo: str
    commit: str
    url: str
    pull_request: str | None
    private: bool


class Hub:
    """The requests of one upload.

    Args:
        token: None: of the login or HF_TOKEN.
        endpoint: None: HF_ENDPOINT or the public Hub.
        stop: whether the run was asked to stop, which is looked at between the steps; None: nobody asks.
    """

    def __init__(
        self, say: Callable[[str], None], *, token: str | None = None, endpoint: str | None = None,
        stop: Stop | None = None,
    ):  # fmt: skip
        from huggingface_hub import HfApi

        self.say, self._stop = say, stop or Stop()
        self.token = usable_token(token)
        self._api = HfApi(endpoint=endpoint, token=self.token)
        self._step = ""  # what is asked of the Hub, for messages; nothing while our own code runs

    def publish(
        self, folder: Path, to: Destination, *, message: str, fetched: Path, try_it: Callable[[Path], None]
    ) -> Uploaded:
        """Upload, fetch back, try, and open to the public where that was asked for.

        Args:
            fetched: where the repository is fetched to; removed once it has been tried.
            try_it: folder -> loads it and raises `UserError` where it is not what was published.

        Raises:
            Stopped: the run was asked to stop. Another call with the same folder begins again.
        """
        try:
            return self._published(folder, to, message, fetched, try_it)
        except (UserError, Stopped):
            raise
        except Exception as error:  # its exceptions hold requests: only their text goes on, redacted
            if not self._step:  # of our own code
                raise
            hint = "check the network, the room for what is fetched back, and https://status.huggingface.co, and run "
            hint += "the same command again"
            if any(getattr(getattr(e, "response", None), "status_code", 0) in (401, 403, 404) for e in causes(error)):
                hint = f"check the name, and that your token may write to {to.repo.split('/')[0]} (hf auth whoami)"
            problem = UserError(f"{to.repo}, {self._step}: {self._clean(error)}", hint=hint)
        raise problem  # outside the handler, which would chain the exception

    def _published(
        self, folder: Path, to: Destination, message: str, fetched: Path, try_it: Callable[[Path], None]
    ) -> Uploaded:
        api = self._api
        self._stop.check("before it was sent to the Hub")
        self._step = "creating it"
        api.create_repo(to.repo, private=True, exist_ok=True)
        is_private = bool(api.repo_info(to.repo).private)
        if not is_private and not to.pull_request and to.revision is None:
            raise UserError(
                f"{to.repo} is public: what is committed to its main branch is seen before it has been tried",
                hint="set pull_request: true or a revision, or make the repository private first",
            )
        if to.revision is not None:
            self._step = f"making branch {to.revision}"
            api.create_branch(to.repo, branch=to.revision, exist_ok=True)
        self._step = "uploading"
        info = self._commit(folder, to, message)
        self.say(f"uploaded to {to.repo}, commit {info.oid[:12]}; fetching it back")
        left = "it is private" if is_private else "the main branch is as it was"
        self._stop.check(f"after the commit, before what is on the Hub was tried; {left}")
        self._step = "fetching it back"
        shutil.rmtree(fetched, ignore_errors=True)
        api.snapshot_download(to.repo, revision=info.pr_revision or info.oid, local_dir=fetched, force_download=True)
        self._step = ""
        _compare(folder, fetched)
        try_it(fetched)
        shutil.rmtree(fetched)
        self._stop.check(f"after what is on the Hub was tried; {left}")
        self._step = "making it public"
        if to.public:
            api.update_repo_settings(to.repo, private=False)
        is_private = bool(api.repo_info(to.repo).private)
        if to.public and is_private:
            raise UserError(f"{to.repo} is still private", hint="make it public on its page: its content is verified")
        return Uploaded(to.repo, info.oid, info.commit_url, info.pr_url, is_private)

    def _commit(self, folder: Path, to: Destination, message: str) -> Any:
        """One commit, after which the repository holds the folder's files and no others.

        Files of an earlier publication go. Raises `UserError` where another model's would.
        """
        there = set(self._api.list_repo_files(to.repo, revision=to.revision)) - _OWN_FILES
        others = sorted(there - {str(path.relative_to(folder)) for path in folder.rglob("*")})
        if others and not {SUMS, MANIFEST} <= there:
            named = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
            raise UserError(
                f"{to.repo} holds files that no publication wrote ({named}), which the commit would remove",
                key="repo", hint="name a repository of its own, or take them away first",
            )  # fmt: skip
        return self._api.upload_folder(
            repo_id=to.repo, folder_path=folder, commit_message=message, revision=to.revision,
            create_pr=to.pull_request, delete_patterns=others or None,
        )  # fmt: skip

    def _clean(self, error: BaseException) -> str:
        """What an exception and its causes say, in a line each, without the token."""
        lines = []
        for cause in [*causes(error)][:3]:
            text = str(cause).replace(self.token or HIDDEN, HIDDEN)
            lines.append(" ".join(shortened(text, 500).split()) or type(cause).__name__)
        return " <- ".join(dict.fromkeys(lines))


def usable_token(token: str | None = None) -> str:
    """The given token, or else that of the login or HF_TOKEN.

    Raises:
        UserError: there is none, or the Hub is switched off.
    """
    from huggingface_hub import constants, get_token

    if (token := token or get_token()) is None:
        raise UserError("not logged in to the Hub", hint="hf auth login, or set HF_TOKEN to a token that may write")
    if constants.HF_HUB_OFFLINE:
        hint = "unset HF_HUB_OFFLINE, or set upload=false"
        raise UserError("the Hub is switched off (HF_HUB_OFFLINE)", hint=hint)
    return token


def _compare(folder: Path, fetched: Path) -> None:
    """Raises `UserError` with the name of the first file that came back otherwise than it was sent."""
    hint = "the repository was left as it is: run the same command again"
    for name in (SUMS, CARD):
        if not (fetched / name).is_file() or sha256_of(fetched / name) != sha256_of(folder / name):
            raise UserError(f"{name} came back from the Hub otherwise than it was sent", where=name, hint=hint)
    try:
        check_sums(fetched)
    except UserError as error:
        raise UserError(f"came back from the Hub: {error.problem}", where=error.where, hint=hint) from error


# Names of repositories: engines guess a draft's method from its path, so that a name can make them load it as another.


def taken_for(repo: str) -> str | None:
    """The method's mark that an engine finds first in a path."""
    return next((mark for mark in MATCHED if mark in repo.lower()), None)


def suggested(method: str, target: str | None) -> str:
    """A name that is in use for such drafters, without its namespace."""
    model = (target or "my-target").rstrip("/").split("/")[-1].removesuffix("-hf")
    name = {"eagle": f"EAGLE-{model}", "eagle3": f"EAGLE3-{model}"}.get(method, f"{model}-{word(method)}-draft")
    return f"{model}-draft" if method not in _METHODS and method != word(method) and taken_for(name) else name


def word(method: str) -> str:
    """A kind as one word, for names and tags: of a class of another package its name (`Hydra` of HydraConfig)."""
    name = method.rpartition(":")[2].rpartition(".")[2]
    return name.removesuffix("Config").lower() or name.lower() if ":" in method else method


def is_repo(repo: str) -> bool:
    """Whether the Hub takes it for NAMESPACE/NAME."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError:
        return False
    return "/" in repo


def check_name(repo: str, method: str, target: str | None, *, is_language: bool) -> None:
    """Raises `UserError` for a path that engines take for another method's.

    Args:
        is_language: the target is a language model; no engine drafts for image generators by these names.
    """
    named, wanted = taken_for(repo), _METHODS.get(method)
    if named == wanted or (not is_language and named is None):
        return
    contains = f"holds {named!r}" if named else f"does not hold {wanted!r}"
    as_what = f"take it for {named.rstrip('-').upper()}" if named else "do not know it for what it is"
    hint = f"a name in use is NAMESPACE/{suggested(method, target)}"
    if named and named in repo.split("/")[0].lower() + "/":
        hint += " (the namespace counts, too)"
    raise UserError(
        f"repo: {repo!r} {contains}: engines that go by the path {as_what}, and this is {method}",
        key="repo", hint=hint,
    )  # fmt: skip
