"""What a server and its nodes say to each other, whatever carries it: executor and node."""
