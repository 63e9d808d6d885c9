"""What every test stands on."""

import signal

# Under `nohup` or in the background of a script the tests would inherit signals that are ignored, and hand that on to the
# processes whose answer to those signals they test.
for number in (signal.SIGHUP, signal.SIGQUIT):
    signal.signal(number, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
