"""Exit codes of commands and runs."""

# Exit codes. Scripts and schedulers branch on them: never give one another meaning.
OK, CRASH, MISTAKE, FAULTS, STOPPED = 0, 1, 2, 3, 143
EXIT_CODES = {
    OK: "done",
    CRASH: "crashed: a bug or a fault of the machine, with its traceback; or another rank was stopped or lost, which "
    "one sentence names",
    MISTAKE: "a mistake in the command, the recipe or the data, or a run that had to stop; the message says what to do",
    FAULTS: "only `check`, `doctor`, `verify`, `verify-engine` and a dry run (`dry_run=true`): they found something "
    "that must be fixed, or a stage that does not fit the hardware (warnings alone give 0)",
    STOPPED: "stopped on request (SIGTERM, Ctrl-C), with what was done saved; the same command continues from there",
}
