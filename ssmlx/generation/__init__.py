"""From settings to tokens: plans of answers, batches, what answers teach, step costs, memory."""
