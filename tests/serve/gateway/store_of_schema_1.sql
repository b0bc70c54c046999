BEGIN TRANSACTION;
CREATE TABLE clock (
	id INTEGER NOT NULL, 
	seconds FLOAT NOT NULL, 
	PRIMARY KEY (id)
);
INSERT INTO "clock" VALUES(1,0.0);
CREATE TABLE gateways (
	name VARCHAR(200) NOT NULL, 
	beats BIGINT NOT NULL, 
	PRIMARY KEY (name)
);
CREATE TABLE jobs (
	number INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	id VARCHAR(40) NOT NULL, 
	key_id VARCHAR(16) NOT NULL, 
	model VARCHAR(200) NOT NULL, 
	request TEXT NOT NULL, 
	priority INTEGER NOT NULL, 
	status VARCHAR(16) NOT NULL, 
	step INTEGER NOT NULL, 
	attempts INTEGER NOT NULL, 
	owner VARCHAR(200), 
	error_code VARCHAR(64), 
	error_message TEXT, 
	created_at FLOAT NOT NULL, 
	started_at FLOAT, 
	completed_at FLOAT, 
	created_tick FLOAT NOT NULL, 
	ended_tick FLOAT, 
	expires_tick FLOAT, 
	media_type VARCHAR(64), 
	num_bytes BIGINT, 
	sha256 VARCHAR(64), 
	idempotency_key VARCHAR(255), 
	fingerprint VARCHAR(64), 
	CONSTRAINT one_job_for_an_idempotency_key UNIQUE (key_id, idempotency_key), 
	UNIQUE (id)
);
INSERT INTO "jobs" VALUES(1,'video_5c29fb14d2198278fa506008e8fc19b4','c7f580185298','text_to_video','{"prompt": "a red seven", "negative_prompt": "", "seed": 3, "guidance": 2.0, "num_steps": 4, "sampler": "euler", "num_frames": 5, "height": 16, "width": 24, "fps": 8.0, "num_videos": 1, "preview_every": 0, "eta": 0.0}',2,'completed',4,1,'old:8080',NULL,NULL,1.79526887316865849499e+09,1.79526887343542551991e+09,1.79526887349405717846e+09,0.0,0.0,86400.0,'video/mp4',5,'0000000000000000000000000000000000000000000000000000000000000000','order-0','ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff');
INSERT INTO "jobs" VALUES(2,'video_029b1a896c688fe86de477a687f9f816','c7f580185298','text_to_video','{"prompt": "a red seven", "negative_prompt": "", "seed": 3, "guidance": 2.0, "num_steps": 4, "sampler": "euler", "num_frames": 5, "height": 16, "width": 24, "fps": 8.0, "num_videos": 1, "preview_every": 0, "eta": 0.0}',2,'failed',0,1,'old:8080','invalid_request','no such sampler',1.79526887329526948925e+09,1.79526887354165101055e+09,1.79526887362979221344e+09,0.0,0.0,NULL,NULL,NULL,NULL,NULL,'ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff');
INSERT INTO "jobs" VALUES(3,'video_be1c75fc43a99589551131535da549c0','c7f580185298','text_to_video','{"prompt": "a red seven", "negative_prompt": "", "seed": 3, "guidance": 2.0, "num_steps": 4, "sampler": "euler", "num_frames": 5, "height": 16, "width": 24, "fps": 8.0, "num_videos": 1, "preview_every": 0, "eta": 0.0}',2,'in_progress',2,1,'old:8080',NULL,NULL,1.79526887335035037996e+09,1.79526887366744637491e+09,NULL,0.0,NULL,NULL,NULL,NULL,NULL,NULL,'ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff');
INSERT INTO "jobs" VALUES(4,'video_4a3007e7d34229a90da9b0912b833c13','c7f580185298','text_to_video','{"prompt": "a red seven", "negative_prompt": "", "seed": 3, "guidance": 2.0, "num_steps": 4, "sampler": "euler", "num_frames": 5, "height": 16, "width": 24, "fps": 8.0, "num_videos": 1, "preview_every": 0, "eta": 0.0}',2,'queued',0,0,NULL,NULL,NULL,1.79526887337631797791e+09,NULL,NULL,0.0,NULL,NULL,NULL,NULL,NULL,NULL,'ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff');
CREATE TABLE keys (
	id VARCHAR(16) NOT NULL, 
	name VARCHAR(200) NOT NULL, 
	hash VARCHAR(64) NOT NULL, 
	limits TEXT NOT NULL, 
	webhook_url TEXT, 
	webhook_secret TEXT, 
	turn BIGINT NOT NULL, 
	created_at FLOAT NOT NULL, 
	revoked_at FLOAT, 
	PRIMARY KEY (id)
);
INSERT INTO "keys" VALUES('c7f580185298','alice','6c17a491deee9f9b39413aac6113b701b62a24b0f85994353ba26de6d4523ff0','{"requests_per_minute": 600, "max_active": 64, "videos_per_day": 10000}','https://example.org/hook','whsec_ZkBtD0/T0DIrOq06ZIXvg2eBaFoh0WArULhmeUpacSA=',3,1.79526887312092828753e+09,NULL);
CREATE TABLE schema_version (
	version INTEGER NOT NULL, 
	PRIMARY KEY (version)
);
INSERT INTO "schema_version" VALUES(1);
CREATE INDEX jobs_by_status ON jobs (status, key_id, priority, number);
CREATE INDEX results_by_end ON jobs (expires_tick);
CREATE INDEX jobs_of_a_key ON jobs (key_id, number);
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('jobs',4);
COMMIT;
