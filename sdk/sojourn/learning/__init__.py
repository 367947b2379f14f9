"""What the agents of this machine are seen to do: how long tools take, what follows what, how many turns are
left. Learned on a thread of its own, kept in a file, told to the server ahead of time. It hears of the
agents as a listener (``sojourn.observe``) and never touches them."""
