"""Methods that change the policy loss: one file per paper, pure torch, no verl."""
