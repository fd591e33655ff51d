"""A folder to the Hub in one commit: private first, fetched back and tried, and only then made public.

huggingface_hub transfers the files and asks again where a request fails. Nothing that a server says reaches a message
before it is redacted, and no exception of the client is chained: their requests carry the token.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ...core.errors import UserError
from ...core.results import CARD, SUMS, check_sums, sha256_of
from ...core.secrets import HIDDEN, shortened
from ...models.drafters.manifest import MANIFEST
from ..run.stopping import Stop, Stopped

Done = TypeVar("Done")
# What the Hub and its users put beside a publication; nothing of it is loaded, and it stays.
_OWN_FILES = {".gitattributes", "LICENSE", "LICENSE.md", "LICENSE.txt", "NOTICE"}


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
        self._stop.check("before it was sent to the Hub")
        is_private = self._open(to)
        info = self._asked(to, "uploading", lambda: self._commit(folder, to, message))
        self.say(f"uploaded to {to.repo}, commit {info.oid[:12]}; fetching it back")
        left = "it is private" if is_private else "the main branch is as it was"
        self._stop.check(f"after the commit, before what is on the Hub was tried; {left}")
        shutil.rmtree(fetched, ignore_errors=True)
        self._asked(to, "fetching it back", lambda: self._api.snapshot_download(
            to.repo, revision=info.pr_revision or info.oid, local_dir=fetched, force_download=True,
        ))  # fmt: skip
        _compare(folder, fetched)
        try_it(fetched)
        shutil.rmtree(fetched)
        self._stop.check(f"after what is on the Hub was tried; {left}")
        if to.public:
            self._asked(to, "making it public", lambda: self._api.update_repo_settings(to.repo, private=False))
        private = bool(self._asked(to, "asking how it is", lambda: self._api.repo_info(to.repo)).private)
        if to.public and private:
            raise UserError(f"{to.repo} is still private", hint="make it public on its page: its content is verified")
        return Uploaded(to.repo, info.oid, info.commit_url, info.pr_url, private)

    def _open(self, to: Destination) -> bool:
        """A repository that nobody can see into before its content is tried, or a public one whose main branch stays as
        it is; and the branch. Returns whether it is private.
        """
        self._asked(to, "creating it", lambda: self._api.create_repo(to.repo, private=True, exist_ok=True))
        private = bool(self._asked(to, "looking it up", lambda: self._api.repo_info(to.repo)).private)
        if not private and not to.pull_request and to.revision is None:
            raise UserError(
                f"{to.repo} is public: what is committed to its main branch is seen before it has been tried",
                hint="set pull_request: true or a revision, or make the repository private first",
            )
        if (branch := to.revision) is not None:
            self._asked(
                to, f"making branch {branch}", lambda: self._api.create_branch(to.repo, branch=branch, exist_ok=True)
            )
        return private

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

    def _asked(self, to: Destination, what: str, action: Callable[[], Done]) -> Done:
        """An action's result. Raises `UserError` in place of the client's exceptions."""
        from huggingface_hub.errors import OfflineModeIsEnabled

        try:
            return action()
        except (UserError, Stopped):
            raise
        except OfflineModeIsEnabled:
            problem = UserError("the Hub is switched off (HF_HUB_OFFLINE)", hint="unset HF_HUB_OFFLINE")
        except Exception as error:  # its exceptions hold requests: only their text goes on, redacted
            problem = UserError(f"{to.repo}, {what}: {self._clean(error)}", hint=_hint(error, to))
        raise problem  # outside the handler, which would chain the exception

    def _clean(self, error: BaseException) -> str:
        """What an exception and its causes say, in a line each, without the token."""
        lines = []
        for cause in [*_causes(error)][:3]:
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


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The exception and its causes, the last one first."""
    while error is not None:
        yield error
        error = error.__cause__


def _hint(error: BaseException, to: Destination) -> str:
    from huggingface_hub.errors import HfHubHTTPError

    answers = (e.response for e in _causes(error) if isinstance(e, HfHubHTTPError) and e.response is not None)
    if next((int(answer.status_code) for answer in answers), None) in (401, 403, 404):
        return f"check the name, and that your token may write to {to.repo.split('/')[0]} (hf auth whoami)"
    if any(isinstance(e, OSError) and e.errno in (errno.ENOSPC, errno.EDQUOT) for e in _causes(error)):
        return "make room: what is fetched back is as large as what was sent; then run the same command again"
    return "check the network and https://status.huggingface.co, and run the same command again"


def _compare(folder: Path, fetched: Path) -> None:
    """What came back is what was sent. Raises `UserError` with the name of the first file that is not."""
    hint = "the repository was left as it is: run the same command again"
    for name in (SUMS, CARD):
        if not (fetched / name).is_file() or sha256_of(fetched / name) != sha256_of(folder / name):
            raise UserError(f"{name} came back from the Hub otherwise than it was sent", where=name, hint=hint)
    try:
        check_sums(fetched)
    except UserError as error:
        raise UserError(f"came back from the Hub: {error.problem}", where=error.where, hint=hint) from error
