"""What the commands of the `adaptrt` program do; builder/cli.py holds the table of them."""
