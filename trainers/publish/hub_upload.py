"""A folder to the Hub in one commit: private first, fetched back and tried, and only then made public.

A transfer that fails is tried again from what the Hub has by then, so that an answer lost on the way makes no second
commit. Files go one by one, and a run that is asked to stop leaves the one in hand: the same command sends what the Hub
lacks. Nothing that a server says reaches a message before it is redacted, and no exception of the client is chained:
their requests carry the token.
"""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ...core.checksums import CARD, SUMS, check_sums, sha256_of
from ...core.errors import UserError
from ...core.files import read_json, write_whole
from ...core.secrets import HIDDEN, shortened
from ...models.drafters.manifest import MANIFEST
from ..run.stopping import Stop, Stopped
from .awaited import awaited, pause

if TYPE_CHECKING:
    from huggingface_hub import CommitInfo, CommitOperationAdd

Done = TypeVar("Done")
# Answers that another try may change: time-outs, conflicts with another commit, limits, and servers' own troubles.
_PASSING = (408, 409, 412, 425, 429, 500, 502, 503, 504)
# What the Hub and its users put beside a publication; nothing of it is loaded, and it stays.
_OWN_FILES = {".gitattributes", "LICENSE", "LICENSE.md", "LICENSE.txt", "NOTICE"}
# Where it stopped.
_SENDING = "while it was sent to the Hub, which keeps the files that it has whole; nothing is committed"
_TRYING = "after the commit, before what is on the Hub was tried"


PROPOSED = "proposed.json"  # in the stage's folder


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


@dataclass(frozen=True)
class _Commit:
    """revision: at which it is fetched back."""

    oid: str
    url: str
    pull_request: str | None
    revision: str


@dataclass(frozen=True)
class _Proposed:
    of: dict[str, str]
    commit: _Commit


class Hub:
    """The requests of one upload.

    Args:
        token: None: of the login or HF_TOKEN.
        endpoint: None: HF_ENDPOINT or the public Hub.
        attempts: of each request.
        wait: seconds -> after so long; the pause doubles from try to try.
        stop: whether the run was asked to stop; None: nobody asks.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        *,
        token: str | None = None,
        endpoint: str | None = None,
        attempts: int = 5,
        wait: Callable[[float], None] | None = None,
        stop: Stop | None = None,
    ):
        from huggingface_hub import HfApi

        self.say, self.attempts, self._stop = say, attempts, stop or Stop()
        self.wait = wait or (lambda seconds: pause(seconds, self._stop, "between two tries of a request to the Hub"))
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
            Stopped: the run was asked to stop. Another call with the same folder goes on.
        """
        self._stop.check("before it was sent to the Hub")
        trying = _TRYING + ("; it is private" if self._open(to) else "; the main branch is as it was")
        done = self._commit(folder, to, message, fetched.with_name(PROPOSED))
        self.say(f"uploaded to {to.repo}, commit {done.oid[:12]}; fetching it back")
        shutil.rmtree(fetched, ignore_errors=True)
        self._tried(to, "fetching it back", lambda: self._fetch(to.repo, done.revision, fetched, trying))
        _compare(folder, fetched)
        try_it(fetched)
        shutil.rmtree(fetched)
        self._stop.check(trying)
        if to.public:
            self._tried(to, "making it public", lambda: self._api.update_repo_settings(to.repo, private=False))
        private = bool(self._tried(to, "asking how it is", lambda: self._api.repo_info(to.repo)).private)
        if to.public and private:
            raise UserError(f"{to.repo} is still private", hint="make it public on its page: its content is verified")
        return Uploaded(to.repo, done.oid, done.url, done.pull_request, private)

    def _open(self, to: Destination) -> bool:
        """A repository that nobody can see into before its content is tried, or a public one whose main branch stays as
        it is; and the branch. Returns whether it is private.
        """
        private = self._is_private(to)
        if private is None:
            self._tried(to, "creating it", lambda: self._api.create_repo(to.repo, private=True, exist_ok=True))
            private = self._is_private(to)
        if private is False and not to.pull_request and to.revision is None:
            raise UserError(
                f"{to.repo} is public: what is committed to its main branch is seen before it has been tried",
                hint="set pull_request: true or a revision, or make the repository private first",
            )
        if to.revision is not None:
            branch = to.revision
            self._tried(
                to, f"making branch {branch}", lambda: self._api.create_branch(to.repo, branch=branch, exist_ok=True)
            )
        return bool(private)

    def _is_private(self, to: Destination) -> bool | None:
        """None if the repository does not exist or this token may not see it."""
        try:
            return bool(self._tried(to, "looking it up", lambda: self._api.repo_info(to.repo)).private)
        except _Missing:
            return None

    def _commit(self, folder: Path, to: Destination, message: str, proposed: Path) -> _Commit:
        """One commit, after which the repository holds the folder's files and no others.

        Args:
            proposed: file that remembers a pull request, which a stopped run would propose a second time.
        """
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        names = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
        what = {"repo": to.repo, "files": sha256_of(folder / SUMS)}
        if to.pull_request and (earlier := _earlier(proposed, what)) is not None:
            self.say(f"proposed before: {earlier.pull_request}")
            return earlier

        def attempt() -> CommitInfo:
            # From the state as it is now: what an earlier try has left there is not uploaded or committed again.
            parent = self._api.repo_info(to.repo, revision=to.revision).sha
            there = set(self._api.list_repo_files(to.repo, revision=parent)) - _OWN_FILES
            _refuse_foreign(to.repo, there - set(names), there)
            additions = [CommitOperationAdd(name, folder / name) for name in names]
            for addition in additions:
                self._send(addition, to)
            operations: list[Any] = [*additions]
            operations += [CommitOperationDelete(name) for name in sorted(there - set(names))]
            self._stop.check(_SENDING)
            return self._api.create_commit(
                to.repo, operations, commit_message=message, revision=to.revision, create_pr=to.pull_request,
                parent_commit=parent,
            )  # fmt: skip

        # A second try would propose it a second time.
        info = self._tried(to, "uploading", attempt, attempts=1 if to.pull_request else self.attempts)
        done = _Commit(info.oid, info.commit_url, info.pr_url, info.pr_revision or info.oid)
        if to.pull_request:
            write_whole(proposed, json.dumps({"of": what, "commit": asdict(done)}).encode())
        return done

    def _send(self, addition: CommitOperationAdd, to: Destination) -> None:
        """The content of one file, where the Hub keeps it apart from commits and lacks it."""

        def send() -> None:
            self._api.preupload_lfs_files(
                to.repo, [addition], revision=to.revision, create_pr=to.pull_request, free_memory=False
            )

        awaited(send, self._stop, _SENDING)

    def _fetch(self, repo: str, revision: str, into: Path, place: str) -> None:
        from huggingface_hub import hf_hub_download

        for name in self._api.list_repo_files(repo, revision=revision):

            def fetch(name: str = name) -> str:
                return hf_hub_download(
                    repo, name, revision=revision, local_dir=into, token=self.token, endpoint=self._api.endpoint,
                    force_download=True,
                )  # fmt: skip

            awaited(fetch, self._stop, place)

    def _tried(self, to: Destination, what: str, action: Callable[[], Done], *, attempts: int | None = None) -> Done:
        """An action's result, tried again where that may help. Raises `UserError` without the client's exceptions."""
        from huggingface_hub.errors import OfflineModeIsEnabled, RepositoryNotFoundError

        problem: UserError | None = None
        attempts = attempts or self.attempts
        for attempt in range(attempts):
            try:
                return action()
            except (UserError, Stopped):
                raise
            except RepositoryNotFoundError as error:
                problem = _Missing(f"{to.repo}, {what}: {self._clean(error)}", hint=_rights(to))
            except OfflineModeIsEnabled:
                problem = UserError("the Hub is switched off (HF_HUB_OFFLINE)", hint="unset HF_HUB_OFFLINE")
            except Exception as error:  # its exceptions hold requests: only their text goes on, redacted
                problem = UserError(f"{to.repo}, {what}: {self._clean(error)}", hint=_hint(error, to))
                if _passes(error) and attempt + 1 < attempts:
                    self.say(f"{what}: {self._clean(error)}; trying again in {2**attempt} s")
                    self.wait(float(2**attempt))
                    continue
            break
        assert problem is not None
        raise problem from None

    def _clean(self, error: BaseException) -> str:
        """What an exception and its causes say, in a line each, without the token."""
        lines = []
        for cause in _causes(error)[:3]:
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


class _Missing(UserError):
    """The Hub says that there is no such repository, or none that this token may see."""


def _earlier(proposed: Path, what: dict[str, str]) -> _Commit | None:
    """The pull request that an earlier run made of the same files; None: it made none."""
    if not proposed.is_file():
        return None
    hint = "delete the file: the same files are then proposed once more"
    kept = read_json(proposed, _Proposed, hint=hint)
    return kept.commit if kept.of == what else None


def _causes(error: BaseException) -> list[BaseException]:
    """The exception and its causes, the last one first."""
    return [error, *(_causes(error.__cause__) if error.__cause__ is not None else [])]


def _status(error: BaseException) -> int | None:
    """The HTTP status behind an exception or one of its causes."""
    from huggingface_hub.errors import HfHubHTTPError

    answers = (e.response for e in _causes(error) if isinstance(e, HfHubHTTPError) and e.response is not None)
    return next((int(answer.status_code) for answer in answers), None)


def _passes(error: BaseException) -> bool:
    """Whether another try may go better: a passing status, or a connection that broke."""
    status = _status(error)
    if status is not None:
        return status in _PASSING
    # httpx's errors (under either of the names that the client has used) are no OSErrors.
    return any(isinstance(cause, ConnectionError | TimeoutError) or type(cause).__module__.startswith("httpx")
               for cause in _causes(error))  # fmt: skip


def _refuse_foreign(repo: str, others: set[str], there: set[str]) -> None:
    """Files that are not part of a publication go; those of another model stay. Raises `UserError` for the latter."""
    if others and not {SUMS, MANIFEST} <= there:
        named = ", ".join(sorted(others)[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
        raise UserError(
            f"{repo} holds files that no publication wrote ({named}), which the commit would remove",
            key="repo", hint="name a repository of its own, or take them away first",
        )  # fmt: skip


def _rights(to: Destination) -> str:
    return f"check the name, and that your token may write to {to.repo.split('/')[0]} (hf auth whoami)"


def _hint(error: BaseException, to: Destination) -> str:
    status = _status(error)
    if status in (401, 403):
        return _rights(to)
    if any(isinstance(e, OSError) and e.errno in (errno.ENOSPC, errno.EDQUOT) for e in _causes(error)):
        return "make room: what is fetched back is as large as what was sent; then run the same command again"
    if status == 412:
        return "somebody else commits to this repository: try again when they are done"
    return (
        "check the network and https://status.huggingface.co, and run the same command again: it continues from there"
    )


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
