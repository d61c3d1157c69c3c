"""`baru-micro chat`: a conversation in the terminal."""
