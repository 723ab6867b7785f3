"""This package is what a broker does for its clients, whatever language they speak.

Services (topics, groups, long_polling, ...) take and return plain values and know neither wire nor
sockets; `remoting_api` and `admin_api` translate RocketMQ's requests; `server` builds the process.
"""
