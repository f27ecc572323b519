"""python -m paceline is the command paceline."""

from paceline.cli import main

main()
