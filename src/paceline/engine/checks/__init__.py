"""What a model, a loss or an optimizer is refused or reported for, at `join` or in the first steps."""
