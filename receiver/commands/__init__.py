"""The commands of `receiver`, a module for each noun; `cli` loads the one that is called."""
