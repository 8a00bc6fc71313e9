"""One model in several processes: rank 0 has the engine and samples, the others follow its steps with their shares."""
