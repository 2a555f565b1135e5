"""What runs inside the sandbox: the resources, and the process that holds each of them. Standard library only."""
