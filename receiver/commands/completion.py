"""The command that lets a shell complete the others."""

import click
from click.shell_completion import ShellComplete, get_completion_class

from receiver.commands.shared import COMPLETION_VARIABLE


@click.command()
@click.argument("shell", metavar="SHELL", type=click.Choice(("bash", "zsh", "fish")))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print a script that completes commands, options, states and the names in the config.

    SHELL is bash, zsh or fish. Write it where the shell finds it: for bash that is
    ~/.local/share/bash-completion/completions/receiver, for fish
    ~/.config/fish/completions/receiver.fish; in zsh source it from ~/.zshrc after compinit.

    \b
    Example:
      receiver completion bash > receiver.bash
    """
    kind = get_completion_class(shell)
    assert kind is not None, "click knows the shells that can be chosen"
    made = kind(context.find_root().command, {}, "receiver", COMPLETION_VARIABLE)
    # Not by its own method, which starts a bash to ask for its version.
    click.echo(ShellComplete.source(made).strip())
