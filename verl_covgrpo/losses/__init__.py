"""Methods that change the policy loss: one file per paper, pure torch, no verl.

A paper that also changes the advantages has both here.
"""
